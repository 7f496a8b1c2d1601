"""Metrics: fetched from the device late, written as JSON lines and for TensorBoard."""

import collections
import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax

from mlaflax.files import write_whole


class Late:
    """Metrics of steps that may still be running.

    The host hands in the metrics of a step it has just begun and takes out those of `behind` steps before,
    which are finished: the device always has work, and never more than `behind` steps of it.
    """

    def __init__(self, behind: int = 2):
        self._behind = behind
        self._running: collections.deque[tuple[int, Any]] = collections.deque()

    def push(self, step: int, metrics: dict[str, jax.Array]) -> Iterator[tuple[int, dict[str, Any]]]:
        for value in jax.tree.leaves(metrics):
            value.copy_to_host_async()
        self._running.append((step, metrics))
        while len(self._running) > self._behind:
            yield self._take()

    def drain(self) -> Iterator[tuple[int, dict[str, Any]]]:
        while self._running:
            yield self._take()

    def _take(self) -> tuple[int, dict[str, Any]]:
        step, metrics = self._running.popleft()
        return step, {name: value.tolist() for name, value in jax.device_get(metrics).items()}


class Metrics:
    """`metrics.jsonl` and TensorBoard files of a run in `directory`.

    Lines after `start`, the step that training resumes from, are dropped: those steps are run again. A float32
    is written so that it reads back to the bit; NaN and infinity, which JSON lacks, as null.
    """

    def __init__(self, directory: pathlib.Path, start: int, tensorboard: bool):
        self.path = directory / "metrics.jsonl"
        kept = [line for line in read_lines(self.path) if line["step"] <= start]
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = open(self.path, "a", buffering=1)  # noqa: SIM115 - open as long as the run
        self._tensorboard = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._tensorboard = SummaryWriter(
                str(directory / "tensorboard"), purge_step=start + 1, flush_secs=10
            )

    def write(self, step: int, values: dict[str, Any]) -> None:
        self._file.write(json.dumps({"step": step, **_finite(values)}) + "\n")
        if self._tensorboard is not None:
            for name, value in values.items():
                if isinstance(value, list):
                    if value:
                        self._tensorboard.add_scalar(name, max(value), step)
                else:
                    self._tensorboard.add_scalar(name, value, step)

    def flush(self) -> None:
        """Onto the disk: called before a checkpoint is saved that these lines lead up to."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; one that was cut short by a crash is left out."""
    lines = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
    return lines


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
