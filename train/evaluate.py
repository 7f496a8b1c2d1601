"""Loss on held-out documents, and the n-gram model it is measured against."""

import itertools
import json
import math
import pathlib
from typing import NamedTuple

import jax
import numpy as np

from mlaflax.files import write_whole
from train.config import TrainConfig
from train.data import PreparedData
from train.ngram import InterpolatedBigram, KneserNeyTrigram
from train.step import Steps, TrainState


class Evaluation(NamedTuple):
    """Mean -log p of the held-out tokens, in nats, and how many there were."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0)) if math.isfinite(self.loss) else math.inf


def evaluate(steps: Steps, state: TrainState, data: PreparedData, limit: int = 0) -> Evaluation:
    """The model's loss on the first `limit` held-out batches; 0 takes all, each held-out token once."""
    config = steps.config.data
    batches = itertools.islice(data.eval_batches(config.batch_size, config.sequence_length), limit or None)
    sums = [steps.evaluate(state.params, state.state, steps.place(batch)) for batch in batches]
    nll, tokens = np.sum(np.asarray(jax.device_get(sums), np.float64), axis=0)
    return Evaluation(float(nll / tokens), int(tokens))


class Baseline(NamedTuple):
    """An n-gram model's loss on the same held-out tokens."""

    name: str
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def make_baseline(config: TrainConfig, data: PreparedData, directory: pathlib.Path) -> Baseline | None:
    """The n-gram model that `config.target` names, fitted to the training text; None for "none".

    Its loss is kept in `baseline.json`, so that a resumed run does not count again.
    """
    if config.target == "none":
        return None
    path = directory / "baseline.json"
    key = {"target": config.target, "train": data.train.fingerprint, "held_out": data.held_out.fingerprint}
    try:
        saved = json.loads(path.read_text())
        if saved["of"] == key:
            return Baseline(**saved["baseline"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    kind = InterpolatedBigram if config.target == "bigram" else KneserNeyTrigram
    model = kind(data.train_documents, data.tokenizer.vocab_size)
    loss = float(-model.log_probabilities(data.held_out_documents).mean())
    name = "interpolated bigram" if config.target == "bigram" else "Kneser-Ney trigram"
    baseline = Baseline(name, loss)
    write_whole(path, json.dumps({"of": key, "baseline": baseline._asdict()}) + "\n")
    return baseline
