"""Files that are made once: where they live, and writing them so that no reader meets half of one."""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from mlaflax.config import ConfigError


def directory(configured: str | None) -> pathlib.Path:
    """Where downloads and token files live: as configured, or mlaflax in the user's cache directory."""
    if configured:
        return pathlib.Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(base).expanduser() / "mlaflax"


@contextlib.contextmanager
def filling(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Fill a directory beside `target` that becomes `target` when all is written.

    Processes may race: one of them wins, and the others' equal work is dropped.

    Raises:
      ConfigError: if nothing can be written there.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = pathlib.Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir = {str(target.parent.parent)!r}: must be a directory to write to ({error.strerror})"
        ) from None
    try:
        yield beside
        beside.chmod(0o755)  # mkdtemp's 0700 would hide it from other users of a shared cache
        try:
            beside.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
