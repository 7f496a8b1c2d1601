"""Documents from files: text, JSON lines and Parquet."""

import glob
import json
import pathlib
from collections.abc import Iterator, Sequence

from mlaflax.config import ConfigError, require
from train.data.documents import Document

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet",)
_TEXT = (".txt", ".text", ".md", ".rst")
_SUFFIXES = _JSON_LINES + _PARQUET + _TEXT


def read(paths: Sequence[str], text_field: str) -> Iterator[Document]:
    """Documents of files, directories (searched for known suffixes, hidden files aside) and glob patterns.

    Text files are one document each, named by their path; records of the other formats are named "path:1",
    "path:2", ...

    Raises:
      ConfigError: for a path that matches nothing, a file that is not what its suffix says, or a record
        without `text_field`; the message names the file and the line or column.
    """
    for file in [f for path in paths for f in _expand(path)]:
        suffix = file.suffix.lower()
        if suffix in _JSON_LINES:
            yield from _json_lines(file, text_field)
        elif suffix in _PARQUET:
            yield from _parquet(file, text_field)
        else:
            yield Document(str(file), _text(file))


def _expand(pattern: str) -> list[pathlib.Path]:
    path = pathlib.Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
        found = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        require(
            bool(found),
            "data.paths",
            pattern,
            f"the directory holds no file that ends in {', '.join(_SUFFIXES)}",
        )
        return found
    if any(c in pattern for c in "*?["):
        found = sorted(p for p in map(pathlib.Path, glob.glob(str(path), recursive=True)) if p.is_file())
        require(bool(found), "data.paths", pattern, "no file matches this pattern")
        return found
    raise ConfigError(f"data.paths = {pattern!r}: no such file or directory")


def _text(file: pathlib.Path) -> str:
    raw = _bytes(file)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.paths = {str(file)!r}: must be UTF-8 text, but byte {error.start} "
            f"is 0x{raw[error.start]:02x}"
        ) from None
    # UTF-16 and most binary files decode as UTF-8 only with NULs in them, which no text has.
    require("\0" not in text, "data.paths", str(file), "must be UTF-8 text, but it holds NUL bytes")
    return text


def _bytes(file: pathlib.Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"data.paths = {str(file)!r}: cannot be read ({error.strerror})") from None


def _json_lines(file: pathlib.Path, field: str) -> Iterator[Document]:
    # Only "\n" ends a record: str.splitlines would also cut at U+2028, which JSON strings may hold.
    for number, line in enumerate(_text(file).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"data.paths = {where!r}: the line must be one JSON object ({error})") from None
        if not isinstance(record, dict):
            raise ConfigError(
                f"data.paths = {where!r}: the line must be a JSON object, not {type(record).__name__}"
            )
        if field not in record:
            raise ConfigError(
                f"data.text_field = {field!r}: {where} has no such field; it has {_names(record)}"
            )
        if not isinstance(record[field], str):
            kind = type(record[field]).__name__
            raise ConfigError(f"data.text_field = {field!r}: {where} must hold a string there, not {kind}")
        yield Document(where, record[field])


def _parquet(file: pathlib.Path, column: str) -> Iterator[Document]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        if column in names:
            kind = table.schema_arrow.field(column).type
            is_text = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
            if not is_text:
                raise ConfigError(
                    f"data.text_field = {column!r}: column of {file} must hold strings, not {kind}"
                )
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"data.paths = {str(file)!r}: must be a Parquet file ({error})") from None
    if column not in names:
        raise ConfigError(
            f"data.text_field = {column!r}: {file} has no such column; it has {', '.join(names)}"
        )
    row = 0
    for batch in table.iter_batches(columns=[column], batch_size=1024):
        for text in batch.column(0).to_pylist():
            row += 1
            if text is not None:
                yield Document(f"{file}:{row}", text)


def _names(record: dict) -> str:
    return ", ".join(record) or "none"
