"""What the commands share: reading flags, saying what is wrong in one sentence."""

import contextlib
import dataclasses
import difflib
import io
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mlaflax.config import ConfigError

T = TypeVar("T")
_PLAIN_INTERVAL = 10.0  # seconds between lines where no live line is possible


class CannotDo(RuntimeError):
    """What was asked for is right, but cannot be done; the message says why. Exit status 1."""


def nearest(name: str, known: Sequence[str]) -> str:
    """A clause that names the closest of `known`, or all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def parse(arguments: type[T], flags: Sequence[str], *, prog: str, description: str) -> T:
    """Build the frozen dataclass `arguments`, whose fields are all plain, from its flags.

    `--help` prints the flags and exits with 0.

    Raises:
      ConfigError: an unknown flag (with the nearest known one), a missing one or a value of the wrong type.
    """
    known = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(arguments)]  # pyright: ignore[reportArgumentType]
    for flag in flags:
        name = flag.split("=")[0].replace("_", "-")
        # Before tyro sees it: it would complain of the flag that is missing, not of the misspelt one.
        if name.startswith("--") and name not in (*known, "--help"):
            raise ConfigError(f"{name} is not a flag of {prog}; {nearest(name, known)}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                arguments,
                args=flags,
                prog=prog,
                description=description,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as error:
        if error.code in (0, None):
            raise
        # tyro frames every ValueError, those of our own validation among them.
        if isinstance(error.__context__, ConfigError):
            raise error.__context__ from None
        raise ConfigError(f"{_unframed(said.getvalue())}; see {prog} --help") from None


def _unframed(message: str) -> str:
    """The sentence in one of tyro's messages: below its title, above its next rule, whatever the charset."""
    _, *lines = (line.strip("│ ") for line in message.splitlines())
    for rule, sentence in itertools.groupby(lines, key=lambda line: not line.strip("╰╯─- ")):
        if not rule:
            return " ".join(" ".join(sentence).split()).rstrip(".")
    return message.strip()


class Terminal:
    """Everything that is not the result goes to stderr: progress, summary, errors."""

    def __init__(self):
        self._console = Console(file=sys.stderr, highlight=False)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def working(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """A spinner on a terminal, a plain line elsewhere."""
        if self._console.is_terminal:
            return self._console.status(what)
        self.say(what)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar on a terminal, a plain line every ten seconds elsewhere.

        Yields a function to call with a word on what is done after each of `total` steps.
        """
        if self._console.is_terminal:
            columns = (
                TextColumn(what),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[done]}"),
            )
            with Progress(*columns, console=self._console, transient=True, refresh_per_second=4) as live:
                task = live.add_task("", total=total, done="")
                yield lambda done: live.update(task, advance=1, done=done)
            return
        self.say(f"{what}: {total} steps")
        count, last = 0, time.monotonic()

        def advance(done: str) -> None:
            nonlocal count, last
            count += 1
            if time.monotonic() - last >= _PLAIN_INTERVAL:
                last = time.monotonic()
                self.say(f"{what}: {count} of {total} ({done})")

        yield advance
