"""Retrieval: facts told somewhere in long text, asked for at its end, through the real cache.

A text is held-out documents, end to end, with one fact at each depth. It is prefilled once; then every question is
asked from that same cache, so no answer helps the next one. A question is hit when each token of its answer is the
model's first choice, the answer's tokens before it given.

What a mixed cache reads in 8 bits is no test of its cold tier, so hits are also counted over the needles that are
cold: none of the answer's tokens is in the window of the question or kept in any layer. They are counted once more
over those of which this is true of the whole statement.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from infer.evaluation.served import Served
from infer.evaluation.text import Text
from infer.evaluation.variants import Variant
from mlaflax.cache import LatentCache
from mlaflax.config import require
from mlaflax.model import Transformer
from train.data.needle import VALUE_TOKENS, Fact, NeedleTask


@dataclasses.dataclass(frozen=True)
class Haystack:
    """A text with one fact at each depth.

    Attributes:
      tokens: int32 `[n]`, to be prefilled; with any question and its answer it is one length long.
      facts: what is told, by depth.
      absent: as many facts that are not told, for the score of a guess.
      statements: begin and end of each fact's statement.
      answers: begin and end of the value in it.
    """

    tokens: np.ndarray
    facts: Sequence[Fact]
    absent: Sequence[Fact]
    statements: Sequence[tuple[int, int]]
    answers: Sequence[tuple[int, int]]


class Reader(Protocol):
    """What is asked: it reads a text, then answers questions about it."""

    def read(self, tokens: np.ndarray) -> Any:
        """Read a text int32 `[n]`; returns what the questions are asked of."""
        ...

    def knows(self, state: Any, question: Sequence[int], answer: Sequence[int]) -> bool:
        """Whether every token of `answer` is the first choice after `question` and the ones before it."""
        ...

    def near(self, state: Any) -> np.ndarray | None:
        """Which of the text's tokens the question reads in 8 bits in any layer, bool `[n]`; None without tiers."""
        ...


class CacheReader:
    """A model with a cache of one variant; its state is the number of tokens read and the cache."""

    def __init__(self, model: Transformer, variant: Variant, length: int):
        self._served, self._model, self._length = Served(model, variant), model, length

    def read(self, tokens: np.ndarray) -> tuple[int, LatentCache]:
        return len(tokens), self._served.prefill(tokens[None], self._length, keep=False)[1]

    def knows(self, state: tuple[int, LatentCache], question: Sequence[int], answer: Sequence[int]) -> bool:
        start, cache = state
        tokens = np.array([[*question, *answer[:-1]]], np.int32)
        hidden = self._served.look(cache, tokens, start)
        choices = jnp.argmax(self._model.logits(hidden[0, -len(answer) :]), axis=-1)
        return np.asarray(choices).tolist() == list(answer)

    def near(self, state: tuple[int, LatentCache]) -> np.ndarray | None:
        count, cache = state
        if cache.hot is None:
            return None
        config = cache.hot.config
        near = np.zeros(count, bool)
        # The window of the first token asked; later ones have left no more of the text in it.
        near[max(0, (count // config.page - config.ring + 1) * config.page) :] = True
        near[: config.sinks] = True
        index = np.asarray(cache.hot.index)
        near[index[index >= 0]] = True
        return near


def haystack(
    task: NeedleTask, documents: Sequence[np.ndarray], length: int, depths: int, rng: np.random.Generator
) -> Haystack:
    """A text whose facts are told at `(i + 1/2) / depths` of its length.

    Raises:
      ConfigError: the length has no room for the facts, the question and as much text.
    """
    facts = task.facts(2 * depths, rng)
    told, absent = facts[:depths], facts[depths:]
    question, answer = task.question(told[0])
    room = length - len(question) - len(answer)
    needed = 2 * depths * task.statement_length + len(question) + len(answer)
    require(length >= needed, "lengths", length, f"must be at least {needed} for needles at {depths} depths")
    plain = room - depths * task.statement_length
    text = _text(documents, plain, rng)
    parts, statements, answers, start, at = [], [], [], 0, 0
    for i, fact in enumerate(told):
        stop = round((i + 0.5) / depths * plain)
        statement = np.array(task.statement(fact), np.int32)
        parts += [text[start:stop], statement]
        at += stop - start
        statements.append((at, at + len(statement)))
        answers.append((at + len(question), at + len(question) + len(answer)))
        at += len(statement)
        start = stop
    return Haystack(np.concatenate([*parts, text[start:]]), told, absent, statements, answers)


def _text(documents: Sequence[np.ndarray], length: int, rng: np.random.Generator) -> np.ndarray:
    """`length` tokens of documents in random order, again and again if need be."""
    found: list[np.ndarray] = []
    count = 0
    while count < length:
        for i in rng.permutation(len(documents)):
            found.append(documents[i])
            count += len(documents[i])
            if count >= length:
                break
    return np.concatenate(found)[:length].astype(np.int32)


class Grid(NamedTuple):
    """Needles of one length, by trial and depth.

    Attributes:
      hits: bool `[trials, depths]`.
      cold: bool `[trials, depths]`, whether all the answer is read in 4 bits in every layer; None without tiers.
      all_cold: the same of the whole statement.
    """

    hits: np.ndarray
    cold: np.ndarray | None = None
    all_cold: np.ndarray | None = None


def ask(
    reader: Reader, task: NeedleTask, stacks: Sequence[Haystack], advance: Callable[[], None] = lambda: None
) -> Grid:
    """Ask for every fact of every text."""
    hits, cold, all_cold = [], [], []
    for stack in stacks:
        state = reader.read(stack.tokens)
        hits.append([reader.knows(state, *task.question(fact)) for fact in stack.facts])
        near = reader.near(state)
        if near is not None:
            cold.append([not near[a:b].any() for a, b in stack.answers])
            all_cold.append([not near[a:b].any() for a, b in stack.statements])
        advance()
    if not cold:
        return Grid(np.array(hits))
    return Grid(np.array(hits), np.array(cold), np.array(all_cold))


def guess_rate(reader: Reader, task: NeedleTask, stacks: Sequence[Haystack]) -> float:
    """Share of hits among questions for facts that the text does not tell."""
    hits = []
    for stack in stacks:
        state = reader.read(stack.tokens)
        hits += [reader.knows(state, *task.question(fact)) for fact in stack.absent]
    return float(np.mean(hits))


def haystacks(
    task: NeedleTask, text: Text, lengths: Sequence[int], depths: int, trials: int, seed: int
) -> dict[int, list[Haystack]]:
    """`trials` texts of each length, the same for every variant.

    Raises:
      ConfigError: as `haystack`.
    """
    return {
        length: [
            haystack(task, text.documents, length, depths, np.random.default_rng([seed, length, i]))
            for i in range(trials)
        ]
        for length in lengths
    }


def measure(
    readers: Mapping[str, Reader],
    task: NeedleTask,
    stacks: Mapping[int, Sequence[Haystack]],
    advance: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Hit rates of every reader, by depth and length.

    Args:
      readers: the first one is the baseline.
      stacks: texts by length.
      advance: told of every text that a reader has been asked about, and of those read to guess.
    """
    baseline = next(iter(readers))
    grids: dict[str, dict[int, Grid]] = {}
    for name, reader in readers.items():
        grids[name] = {}
        for length, texts in stacks.items():
            grids[name][length] = ask(reader, task, texts, lambda name=name: advance(name))
    guessed = {}
    for length, texts in stacks.items():
        guessed[length] = guess_rate(readers[baseline], task, texts)
        advance("guesses")
    return {
        **summary(grids, baseline),
        "chance": {
            "measured": guessed,
            "computed": len(task.words) ** -float(VALUE_TOKENS),
        },
    }


def steps(stacks: Mapping[int, Sequence[Haystack]], readers: int) -> int:
    """How often `measure` tells of something done."""
    return readers * sum(map(len, stacks.values())) + len(stacks)


def summary(grids: Mapping[str, Mapping[int, Grid]], baseline: str) -> dict[str, Any]:
    """Rates and losses from what was hit."""
    first = next(iter(grids[baseline].values()))
    depths = first.hits.shape[1]
    variants = {}
    for name, by_length in grids.items():
        base = {length: grids[baseline][length].hits for length in by_length}
        trials = sum(grid.hits.size for grid in by_length.values())
        variants[name] = {
            "trials": trials,
            **_counts(by_length, base, {length: np.ones_like(hits) for length, hits in base.items()}),
            "lengths": {
                length: {
                    "hit_rate": float(grid.hits.mean()),
                    "hit_rate_by_depth": grid.hits.mean(axis=0).tolist(),
                    "trials": grid.hits.size,
                    "hits": grid.hits.astype(int).tolist(),
                    "cold": None if grid.cold is None else grid.cold.astype(int).tolist(),
                }
                for length, grid in by_length.items()
            },
        }
        for which in ("cold", "all_cold"):
            among = {n: m for n, grid in by_length.items() if (m := getattr(grid, which)) is not None}
            needles = sum(int(m.sum()) for m in among.values())
            variants[name][which] = (
                {"needles": needles, "share": needles / trials, **_counts(by_length, base, among)}
                if among
                else None
            )
    return {
        "baseline": baseline,
        "depths": [(i + 0.5) / depths for i in range(depths)],
        "trials_per_depth": first.hits.shape[0],
        "variants": variants,
    }


def _counts(
    grids: Mapping[int, Grid], base: Mapping[int, np.ndarray], among: Mapping[int, np.ndarray]
) -> dict[str, int]:
    """Needles found, found by the baseline, and found by that alone, among those of the masks."""

    def total(count: Callable[[int], np.ndarray]) -> int:
        return sum(int((count(length) & mask).sum()) for length, mask in among.items())

    return {
        "hits": total(lambda n: grids[n].hits),
        "baseline_found": total(lambda n: base[n]),
        "lost": total(lambda n: base[n] & ~grids[n].hits),
    }
