"""Writing files so that whatever has its final name is whole."""

import os
import pathlib


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
