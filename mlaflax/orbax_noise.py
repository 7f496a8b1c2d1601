"""Keeps Orbax, and what runs beneath it, from printing failures that reach the caller as exceptions anyway."""

import contextlib
import functools
import gc
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator

_ORBAX = f"{os.sep}orbax{os.sep}"


def quiet_orbax() -> None:
    """Silence Orbax for the rest of the process; may be called again."""
    _silence_abandoned_work()
    # Orbax logs every failure with a traceback per thread; each reaches the caller as a CheckpointError.
    logger = logging.getLogger("absl")
    if not any(isinstance(f, _FromOrbax) for f in logger.filters):
        logger.addFilter(_FromOrbax())


class _FromOrbax(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return _ORBAX not in record.pathname


@contextlib.contextmanager
def dropping_what_failed() -> Iterator[None]:
    """Drop what a failed restore still holds now, rather than at some later collection."""
    try:
        yield
    except Exception as error:
        link: BaseException | None = error
        while link is not None:
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__
        gc.collect()
        raise


@functools.cache
def _silence_abandoned_work() -> None:
    """When one array cannot be read or written, Orbax abandons all others; they fail later, unheard.

    Each would print a traceback, from a thread of TensorStore, from asyncio or when its coroutine is collected,
    at once or at any later collection: so what silences them stays, and lets all else through.
    """
    logging.getLogger("asyncio").addFilter(_NoAbandonedWork())
    warnings.filterwarnings(
        "ignore", r"coroutine '(\w+\.)*_?(async_|read_)\w+' was never awaited", RuntimeWarning
    )
    excepthook, unraisablehook = sys.excepthook, sys.unraisablehook

    def uncaught(kind, error, trace):
        # TensorStore's threads end here. What ends the program itself began in a file of the program: it is told.
        began = trace.tb_frame.f_code.co_filename if trace else ""
        if not (f"{os.sep}asyncio{os.sep}" in began or _ORBAX in began) or not _is_abandoned_work(error):
            excepthook(kind, error, trace)

    def unraisable(raised):
        if not _is_abandoned_work(raised.exc_value):
            unraisablehook(raised)

    sys.excepthook, sys.unraisablehook = uncaught, unraisable


class _NoAbandonedWork(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and _is_abandoned_work(record.exc_info[1]))


def _is_abandoned_work(error: BaseException | None) -> bool:
    """Whether it was raised beneath Orbax, by TensorStore, or calling back into a loop that is gone."""
    if error is None:
        return False
    if re.search(r"\b(OCDBT|TensorStore|zarr|Event loop is closed)\b", str(error)):
        return True
    return any(_ORBAX in f.f_code.co_filename for f, _ in traceback.walk_tb(error.__traceback__))
