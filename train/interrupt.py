"""SIGINT and SIGTERM: finish the step, save, stop; a second one stops at once."""

import os
import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Catches SIGINT and SIGTERM while it is entered; `signal` is the one that came, or None.

    A second signal ends the process on the spot with status 128 + signal, even inside a long compilation:
    Python runs signal handlers between bytecodes only, so a thread reads the wake-up pipe that the C handler
    writes to.
    """

    def __init__(self, on_first=None):
        self.signal: signal.Signals | None = None
        self._on_first = on_first

    def __enter__(self) -> "Interrupt":
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old = {s: signal.signal(s, self._handle) for s in _SIGNALS}
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="interrupt", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for s, handler in self._old.items():
            signal.signal(s, handler)
        os.write(self._write, b"\0")

    def _handle(self, number: int, _: FrameType | None) -> None:
        """Nothing to do here: the thread does it. Its presence keeps Python from raising KeyboardInterrupt."""

    def _watch(self) -> None:
        while (number := os.read(self._read, 1)[0]) != 0:
            if number not in _SIGNALS:
                continue
            if self.signal is not None:
                os._exit(128 + number)
            self.signal = signal.Signals(number)
            if self._on_first:
                self._on_first(self.signal)
        os.close(self._read)
        os.close(self._write)

    @property
    def status(self) -> int:
        """The exit status of a program that this signal ended."""
        return 128 + self.signal if self.signal else 0
