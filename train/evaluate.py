"""Loss on held-out documents, and the n-gram model it is measured against."""

import itertools
import math
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mlaflax.checkpoint import write_whole
from mlaflax.config import to_dict
from train.config import TrainConfig
from train.data import PreparedData
from train.step import Steps, TrainState


class Evaluation(NamedTuple):
    """Mean -log p of the held-out tokens, in nats, and how many there were."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0)) if math.isfinite(self.loss) else math.inf


def evaluate(steps: Steps, state: TrainState, data: PreparedData) -> Evaluation:
    """The model's loss on the held-out batches that `TrainConfig.eval_batches` asks for."""
    sums = [
        steps.evaluate(state.params, state.state, steps.place(b))
        for b in held_out_batches(steps.config, data)
    ]
    nll, tokens = np.sum([np.asarray(s, np.float64) for s in sums], axis=0)
    return Evaluation(float(nll / tokens), int(tokens))


def held_out_batches(config: TrainConfig, data: PreparedData) -> Iterator[dict[str, np.ndarray]]:
    batches = data.eval_batches(config.data.batch_size, config.data.sequence_length)
    return itertools.islice(batches, config.eval_batches or None)


class Baseline(NamedTuple):
    """An n-gram model's loss on the same held-out tokens."""

    name: str
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def make_baseline(config: TrainConfig, data: PreparedData, directory: pathlib.Path) -> Baseline | None:
    """The n-gram model that `config.target` names, fitted to the training text; None for "none"."""
    if config.target == "none":
        return None
    raise NotImplementedError(config.target)
