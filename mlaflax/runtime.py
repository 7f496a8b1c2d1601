"""What a program sets up before its first array: memory allocation and the compilation cache."""

import ctypes
import os
import pathlib
import sys

import jax

# malloc.h of glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP = 1 << 30


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory, up to 1 GiB at the top of the heap, in place of handing it back.

    XLA:CPU takes its temporary buffers from malloc on every execution. By default glibc maps each large
    block afresh and unmaps it when freed, so every training step pays page faults for all of its
    intermediate values. Call it before the first array exists. Returns whether anything was set: false on
    other C libraries, and where the user tuned malloc through the environment.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEEP) and mallopt(_M_TRIM_THRESHOLD, _KEEP))


def cache_directory() -> pathlib.Path:
    """Where programs keep what they can make again: $XDG_CACHE_HOME/mlaflax or ~/.cache/mlaflax."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "mlaflax"


def use_compilation_cache(directory: str | os.PathLike | None = None) -> pathlib.Path:
    """Keep compiled programs on disk, in `directory` (default: `cache_directory()/xla`), for later processes."""
    path = pathlib.Path(directory) if directory else cache_directory() / "xla"
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return path
