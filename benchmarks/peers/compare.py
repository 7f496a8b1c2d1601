"""Turns among workers, medians of ratios, and how a side-by-side program ends. Shared by its drivers.

Every round each contestant runs a few steps, one after the other, in an order that rotates; a ratio is formed
within a round and the median is taken over rounds, so that a machine that speeds up or slows down moves both
sides of it.
"""

import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peers.protocol import ROOT, Peer, PeerError

SETTLE_SECONDS = 0.05  # thread pools of the peer before spin for a moment after their last task


@dataclasses.dataclass
class Contestant:
    """One worker with one workload, and what came of it.

    Attributes:
      name: of the peer.
      dtype: as the worker understands it.
      peer: the worker process.
      setup: arguments of its `setup`.
      need_bytes: memory that `setup` and steps may take; see `in_groups`.
      rounds: seconds per step, one median per round.
      info: the answer to `setup`.
      error: why there are no figures, if there are none.
    """

    name: str
    dtype: str
    peer: Peer
    setup: dict[str, Any]
    need_bytes: int = 0
    rounds: list[float] = dataclasses.field(default_factory=list)
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)

    @property
    def width(self) -> int:
        """Bytes per number of its weights: 4 or 2; contestants of one width are compared."""
        return 4 if self.dtype.startswith("f32") else 2


@dataclasses.dataclass(frozen=True)
class Turns:
    """How turns are taken: `rounds` of about `seconds` each, at least one and at most `max_steps` steps."""

    rounds: int = 5
    seconds: float = 1.0
    max_steps: int = 12
    threads: int = 2

    @property
    def room(self) -> int:
        """Steps a worker must have room for beyond what `setup` ran itself."""
        return (self.rounds + 1) * self.max_steps


def say(text: str) -> None:
    """Progress goes to stderr: stdout holds the result."""
    print(text, file=sys.stderr, flush=True)


def run(contestants: list[Contestant], turns: Turns, before_round: Callable[[], None] = lambda: None) -> None:
    """Set up all contestants, take turns, release them; fills `rounds`, `info` and `error`."""
    steps = {}
    for c in contestants:
        c.rounds.clear()
        start = time.perf_counter()
        try:
            c.info = c.peer.setup(threads=turns.threads, **c.setup)
            first = c.peer.step(n=1)["seconds"][0]
        except PeerError as error:
            _fail(c, error)
            continue
        steps[id(c)] = max(1, min(turns.max_steps, int(turns.seconds / max(first, 1e-6))))
        ready = time.perf_counter() - start
        say(f"    {c.name} {c.dtype}: ready in {ready:.1f} s, first step {first * 1e3:.1f} ms")
    for i in range(turns.rounds):
        before_round()
        playing = [c for c in contestants if not c.error]
        for c in playing[i % len(playing) :] + playing[: i % len(playing)] if playing else []:
            time.sleep(SETTLE_SECONDS)
            try:
                c.rounds.append(statistics.median(c.peer.step(n=steps[id(c)])["seconds"]))
            except PeerError as error:
                _fail(c, error)
        say(f"    round {i + 1} of {turns.rounds}")
    for c in contestants:
        if c.error:
            c.peer.quit()  # whatever state it is in, its memory is given back
        else:
            c.peer.release()


def _fail(contestant: Contestant, error: PeerError) -> None:
    contestant.error = str(error)
    contestant.rounds.clear()
    say(f"    {contestant.name} {contestant.dtype}: {error}")


def available_bytes() -> int:
    """Memory that can be taken without swapping."""
    fields = dict(line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def in_groups(ours: list[Contestant], peers: list[Contestant], budget: int) -> list[list[Contestant]]:
    """Peers split so that each group, with ours in each, fits into `budget` bytes of memory."""
    base = sum(c.need_bytes for c in ours)
    groups: list[list[Contestant]] = [[]]
    for c in peers:
        if groups[-1] and base + sum(x.need_bytes for x in groups[-1]) + c.need_bytes > budget:
            groups.append([])
        groups[-1].append(c)
    return groups


def ratios(ours: list[float], peer: list[float]) -> list[float]:
    """How many times as fast ours is, round by round."""
    return [p / o for o, p in zip(ours, peer, strict=True)]


def table(header: list[str], rows: list[list[str]]) -> str:
    """Plain columns: the first two to the left, figures to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells):
        left = [cell.ljust(w) for cell, w in zip(cells[:2], widths[:2], strict=True)]
        right = [cell.rjust(w) for cell, w in zip(cells[2:], widths[2:], strict=True)]
        return "  ".join(left + right).rstrip()

    return "\n".join([line(header), "-" * len(line(header)), *map(line, rows)])


def machine_facts(threads: int) -> dict[str, Any]:
    """What the figures were taken on."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    return {"cpu": model, "cores": os.cpu_count(), "threads": threads, "load": os.getloadavg()[0]}


def environment_python(variable: str, default: str) -> pathlib.Path:
    """Interpreter of a peers' environment: `variable` names its folder, `default` one in the checkout."""
    return pathlib.Path(os.environ.get(variable, ROOT / default)) / "bin" / "python"


def finish(result: dict[str, Any], summary: str, met: bool, json_path: str | None, check: bool) -> int:
    """Write the JSON, print the last line, return the exit status."""
    result["summary"], result["met"] = summary, met
    if json_path:
        pathlib.Path(json_path).write_text(json.dumps(result, indent=2) + "\n")
    print(summary)
    return 1 if check and not met else 0
