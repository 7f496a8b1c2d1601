"""What a program sets up before its first array: memory allocation, signals, the compilation cache."""

import contextlib
import ctypes
import os
import pathlib
import signal
import sys
import threading
import types

# malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_LARGEST = 2**31 - 1  # mallopt takes an int
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory and use huge pages for it. Call it before importing jax.

    XLA:CPU takes its temporary buffers from malloc at every execution. By default glibc maps each large block
    afresh and unmaps it when it is freed, so every training step pays page faults for all its intermediate
    values: 175,000 of them, 18 % of the time, for the demo on 2 cores. With one arena that never shrinks, in
    huge pages, there are none: 22 % fewer CPU seconds a step. The price is that memory once used stays with the
    process. Address space is reserved 2 GiB at a time; it costs nothing until it is touched.

    Returns whether anything was set: false on other C libraries, and where the user tunes malloc through the
    environment.
    """
    tuned = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if not sys.platform.startswith("linux") or tuned:
        return False
    try:
        libc = ctypes.CDLL(None)
        mallopt, malloc, free, madvise = libc.mallopt, libc.malloc, libc.free, libc.madvise
    except (AttributeError, OSError):
        return False
    # Buffers are allocated by threads, whose arenas of their own would map large blocks regardless.
    options = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, _LARGEST),
        (_M_TRIM_THRESHOLD, _LARGEST),
        (_M_TOP_PAD, _LARGEST),
    )
    if not all(mallopt(option, value) for option, value in options):
        return False
    # Grow the heap now: memory mapped later joins the advice given for it.
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    free.argtypes, madvise.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    free(malloc(256 << 20))
    with contextlib.suppress(OSError, ValueError), open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith("[heap]"):
                first, last = (int(part, 16) for part in line.split()[0].split("-"))
                first = -(-first // _HUGE_PAGE) * _HUGE_PAGE
                madvise(first, last - first, _MADV_HUGEPAGE)
    return True


class Terminated(KeyboardInterrupt):
    """SIGTERM came. What handles Ctrl-C handles it too."""


def leave_silently_when_interrupted() -> None:
    """Let Ctrl-C end the process on the spot, for as long as it imports and has nothing to tell."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_signals() -> None:
    """Make Ctrl-C raise KeyboardInterrupt in the main thread, and SIGTERM `Terminated`."""
    if signal.getsignal(signal.SIGINT) in (
        signal.SIG_DFL,
        signal.default_int_handler,
    ):  # not where it is ignored
        signal.signal(signal.SIGINT, _raise)
    signal.signal(signal.SIGTERM, _raise)


def _raise(number: int, frame: types.FrameType | None) -> None:
    inner = frame
    while inner is not None:
        if inner.f_code.co_name in ("_xla_gc_callback", "__del__"):
            # Python ignores what is raised beneath the garbage collector, where jax has a callback: a signal
            # that comes there would be lost. It comes again.
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
            return
        inner = inner.f_back
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def interrupt_signal(error: KeyboardInterrupt) -> signal.Signals:
    """The signal behind the exception; a program that it ends exits with 128 + signal."""
    return signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT


def leave_stdout() -> None:
    """Send to nowhere what is still to come on stdout, which is closed, broken or full.

    Python would write it once more when it flushes at exit, and complain once more.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if sys.stdout is None:
        sys.stdout = os.fdopen(nowhere, "w")
    else:
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def cache_directory() -> pathlib.Path:
    """Where programs keep what they can make again: $XDG_CACHE_HOME/mlaflax or ~/.cache/mlaflax."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "mlaflax"


def use_compilation_cache(directory: str | os.PathLike | None = None) -> pathlib.Path:
    """Keep compiled programs on disk for later processes, and return where.

    In `directory`, by default `cache_directory()/xla`, or where JAX_COMPILATION_CACHE_DIR already says.
    """
    import jax  # not above: `keep_freed_memory` comes first

    configured = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    path = pathlib.Path(directory or configured or cache_directory() / "xla")
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return path
