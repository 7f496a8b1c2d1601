"""Writing files so that whatever has its final name is whole."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from mlaflax.config import ConfigError, require

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def write_whole(path: pathlib.Path, text: str) -> None:
    """Write a text file beside `path`, flush it to disk and rename it: `path` is never half-written."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: pathlib.Path, field: str) -> Iterator[pathlib.Path]:
    """A folder to fill, beside `path`, which gets that name when the block ends well and is removed otherwise.

    What a killed process left is removed by the next one that writes to the same `path`.

    Args:
      field: what `path` is called in errors.

    Raises:
      ConfigError: `path` exists and is not an empty folder, or another process is writing it.
    """
    path = path.resolve()  # a link to an empty folder stays a link
    require_new(path, field)
    beside = path.with_name(f".{path.name}.unfinished")
    beside.mkdir(parents=True, exist_ok=True)
    lock = os.open(beside, os.O_RDONLY) if fcntl is not None else None
    try:
        if fcntl is not None and lock is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{field} = {str(path)!r}: is being written by another process") from None
            except OSError:
                pass  # a file system without locks
        try:
            _empty(beside)
            yield beside
            require_new(path, field)
            os.replace(beside, path)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
    finally:
        if lock is not None:
            os.close(lock)


def require_new(path: pathlib.Path, field: str) -> None:
    """Raise `ConfigError` unless there is nothing at `path`, or an empty folder."""
    free = not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir()))
    require(free, field, str(path), "must be a new or an empty folder: nothing is overwritten")


def _empty(folder: pathlib.Path) -> None:
    for left in folder.iterdir():
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()
