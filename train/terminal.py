"""What a person sees: a live line, messages, and the summary."""

import collections
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

_PLAIN_INTERVAL = 10.0  # seconds between lines where no live line is possible


class Terminal:
    """Progress goes to stderr: a live line on a terminal, else a plain line every ten seconds."""

    def __init__(self):
        self.console = Console(file=sys.stderr, highlight=False)
        self._progress: Progress | None = None
        self._last = 0.0

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def start(self, step: int, steps: int) -> None:
        self._step, self._steps = step, steps
        self._last = time.monotonic()
        if self.console.is_terminal:
            progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=20),
                TaskProgressColumn(),
                TextColumn("{task.fields[line]}"),
                console=self.console,
                transient=True,
                refresh_per_second=4,
            )
            self._task = progress.add_task("", total=steps, completed=step, line="compiling")
            progress.start()
            self._progress = progress

    def step(self, step: int, line: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step, line=line)
        elif time.monotonic() - self._last >= _PLAIN_INTERVAL or step == self._steps:
            self._last = time.monotonic()
            self.say(f"step {step}/{self._steps}  {line}")

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def summary(self, title: str, rows: dict[str, str]) -> None:
        table = Table(title=title, show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for name, value in rows.items():
            table.add_row(name, value, style=None)
        self.console.print(table)


class Clock:
    """Seconds per step over the last steps, without the time of evaluations, saves and compilation."""

    def __init__(self, window: int = 50):
        self._times: collections.deque[float] = collections.deque(maxlen=window)
        self._last: float | None = None

    def step(self) -> None:
        now = time.monotonic()
        if self._last is not None:
            self._times.append(now - self._last)
        self._last = now

    def pause(self) -> None:
        """The time from the last step to the next one does not count."""
        self._last = None

    @property
    def seconds_per_step(self) -> float | None:
        return sum(self._times) / len(self._times) if self._times else None


def duration(seconds: float) -> str:
    """90 -> "1m30s", 5400 -> "1h30m"."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def progress_line(values: dict[str, Any], speed: dict[str, float], left: float | None) -> str:
    parts = [f"loss {values['loss']:.4f}"]
    if "tokens_per_second" in speed:
        parts.append(f"{speed['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in speed:
        parts.append(f"MFU {speed['mfu']:.1%}")
    if values["max_load"]:
        parts.append(f"busiest expert {max(values['max_load']):.2f}x")
    if values["skipped"]:
        parts.append(f"{values['skipped']} skipped")
    if left is not None:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)
