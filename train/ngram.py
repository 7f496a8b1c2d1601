"""N-gram language models: what counting alone achieves, to judge a trained model by.

Both score the targets a model is evaluated on: every token of a document but its first. A document is a
one-dimensional array of token ids.
"""

from collections.abc import Sequence

import numpy as np

from mlaflax.config import require


class _Counts:
    """Counts of n-grams, looked up by key; n-grams of one context (their key // base) lie together."""

    def __init__(self, keys: np.ndarray, counts: np.ndarray, base: int):
        self.keys, self.counts, self.base = keys, counts, base
        self.contexts, start = np.unique(keys // base, return_index=True)
        self.totals = np.add.reduceat(counts, start) if len(keys) else counts
        self._start = start

    @classmethod
    def of(cls, keys: np.ndarray, base: int) -> "_Counts":
        return cls(*np.unique(keys, return_counts=True), base)

    def count(self, keys: np.ndarray) -> np.ndarray:
        return _lookup(self.keys, self.counts, keys)

    def total(self, contexts: np.ndarray) -> np.ndarray:
        return _lookup(self.contexts, self.totals, contexts)

    def sum_by_context(self, values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, self._start) if len(values) else values


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """`values` at `wanted`, 0 for keys that are not there; `keys` is sorted."""
    if not len(keys):
        return np.zeros(len(wanted), values.dtype)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def _events(documents: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """int64 `[targets, 3]`: two tokens and the target after them; `vocab_size` stands before the first."""
    # Keys are up to (vocab_size + 1)^3 and must fit 63 bits.
    require(0 < vocab_size < 1 << 20, "vocab_size", vocab_size, f"must lie between 1 and {(1 << 20) - 1}")
    parts = []
    for document in documents:
        ids = np.concatenate([[vocab_size], np.asarray(document, np.int64)])
        if len(ids) > 2:
            parts.append(np.stack([ids[:-2], ids[1:-1], ids[2:]], axis=1))
    require(bool(parts), "documents", len(documents), "must hold a document of at least two tokens")
    events = np.concatenate(parts)
    top = max(events[:, 1].max(), events[:, 2].max())
    require(top < vocab_size, "vocab_size", vocab_size, f"must exceed the largest token id ({top})")
    return events


class _Ngram:
    vocab_size: int

    def _probability(self, events: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def log_probabilities(self, documents: Sequence[np.ndarray]) -> np.ndarray:
        """Natural log of the probability of each target, in order: float64 `[targets]`.

        Raises:
          ConfigError: if an id is outside the vocabulary or no document has a target.
        """
        return np.log(self._probability(_events(documents, self.vocab_size)))

    def perplexity(self, documents: Sequence[np.ndarray]) -> float:
        """exp of the mean negative log probability over all targets of all documents."""
        return float(np.exp(-self.log_probabilities(documents).mean()))

    def distribution(self, context: Sequence[int]) -> np.ndarray:
        """Probability of every next token after `context` (at least one token): float64 `[vocab_size]`."""
        before = [self.vocab_size, *context][-2:]
        events = np.empty((self.vocab_size, 3), np.int64)
        events[:, :2] = before
        events[:, 2] = np.arange(self.vocab_size)
        return self._probability(events)


class InterpolatedBigram(_Ngram):
    """Jelinek-Mercer interpolation of bigram, unigram and uniform distribution.

    The three weights depend on how often the previous token was seen (one set per power of two) and are
    fitted by expectation-maximisation on every tenth training document, counted from the others (Jelinek and
    Mercer 1980); the final counts are those of all documents. With fewer than ten documents the weights are
    fitted on every tenth target.
    """

    _ROUNDS = 30

    def __init__(self, documents: Sequence[np.ndarray], vocab_size: int):
        """Count. `documents` are one-dimensional arrays of ids below `vocab_size`."""
        self.vocab_size = vocab_size
        if len(documents) >= 10:
            slices = [
                _events(part, vocab_size)
                for part in (
                    [d for i, d in enumerate(documents) if i % 10],
                    [d for i, d in enumerate(documents) if i % 10 == 0],
                )
            ]
        else:
            events = _events(documents, vocab_size)
            tenth = np.arange(len(events)) % 10 == 9
            slices = [events[~tenth], events[tenth]]
        self._count(slices[0])
        self._fit_weights(slices[1])
        self._count(np.concatenate(slices))

    def _count(self, events: np.ndarray) -> None:
        self._bigrams = _Counts.of(events[:, 1] * self.vocab_size + events[:, 2], self.vocab_size)
        self._unigram = np.bincount(events[:, 2], minlength=self.vocab_size) / len(events)

    def _components(self, events: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weight set of each event, int `[n]`, and its three probabilities, `[n, 3]`."""
        total = self._bigrams.total(events[:, 1])
        bigram = self._bigrams.count(events[:, 1] * self.vocab_size + events[:, 2]) / np.maximum(total, 1)
        uniform = np.full(len(events), 1 / self.vocab_size)
        bucket = np.where(total > 0, 1 + np.log2(np.maximum(total, 1)).astype(int), 0)
        return bucket, np.stack([bigram, self._unigram[events[:, 2]], uniform], axis=1)

    def _fit_weights(self, events: np.ndarray) -> None:
        # Bucket 0, never seen, has no bigram; it and buckets the slice does not reach keep the start.
        weights = np.tile([0.6, 0.35, 0.05], (64, 1))
        weights[0] = 0, 0.95, 0.05
        if len(events):
            bucket, parts = self._components(events)
            size = np.bincount(bucket, minlength=64)
            for _ in range(self._ROUNDS):
                share = weights[bucket] * parts
                share /= share.sum(axis=1, keepdims=True)
                sums = np.stack([np.bincount(bucket, share[:, i], minlength=64) for i in range(3)], axis=1)
                weights = np.where(size[:, None] > 0, sums / np.maximum(size, 1)[:, None], weights)
        # A zero weight of the uniform part would give an unseen token probability 0, however rare it is.
        self._weights = 0.999 * weights + 0.001 * np.array([0, 0, 1.0])

    def _probability(self, events: np.ndarray) -> np.ndarray:
        bucket, parts = self._components(events)
        return (self._weights[bucket] * parts).sum(axis=1)


class KneserNeyTrigram(_Ngram):
    """Interpolated modified Kneser-Ney smoothing of order 3 (Chen and Goodman 1998, section 4.1.6).

    Lower orders count in how many different contexts an n-gram occurs; the unigram is interpolated with the
    uniform distribution, so that every token of the vocabulary has a probability above 0. Each order has
    three discounts, for counts of 1, 2 and more, estimated from its counts of counts.
    """

    def __init__(self, documents: Sequence[np.ndarray], vocab_size: int):
        """Count. `documents` are one-dimensional arrays of ids below `vocab_size`."""
        self.vocab_size = vocab_size
        base = self._base = vocab_size + 1  # one more id, for what stands before a document
        events = _events(documents, vocab_size)
        trigrams = _Counts.of((events[:, 0] * base + events[:, 1]) * base + events[:, 2], base)
        bigrams = _Counts.of(trigrams.keys % base**2, base)
        unigrams = _Counts.of(bigrams.keys % base, base)
        self._levels = [_Level(counts) for counts in (unigrams, bigrams, trigrams)]

    def _probability(self, events: np.ndarray) -> np.ndarray:
        key = np.zeros(len(events), np.int64)
        probability = np.full(len(events), 1 / self.vocab_size)
        for order, level in enumerate(self._levels):
            key = key + events[:, 2 - order] * self._base**order
            probability = level.interpolate(key, probability)
        return probability


class _Level:
    """One order: discounted counts over their context's total, and the weight left to the order below."""

    def __init__(self, counts: _Counts):
        self._counts = counts
        discount = _discounts(counts.counts)[np.minimum(counts.counts, 3)]
        self._kept = counts.counts - discount
        self._freed = counts.sum_by_context(discount)

    def interpolate(self, keys: np.ndarray, below: np.ndarray) -> np.ndarray:
        contexts = keys // self._counts.base
        total = self._counts.total(contexts)
        kept = _lookup(self._counts.keys, self._kept, keys)
        freed = _lookup(self._counts.contexts, self._freed, contexts)
        return np.where(total > 0, (kept + freed * below) / np.maximum(total, 1), below)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Discounts by count 0, 1, 2 and 3 or more, `[4]`.

    Chen and Goodman's estimate, from n_r, the number of n-grams seen r times. Where a text is so small that
    an n_r is 0 or a discount leaves (0, r), Ney's n_1 / (n_1 + 2 n_2), or else one half, takes its place.
    """
    n1, n2, n3, n4 = (float((counts == r).sum()) for r in (1, 2, 3, 4))
    single = n1 / (n1 + 2 * n2) if n1 and n2 else 0.5
    discounts = [0.0]
    for r, (fewer, more) in enumerate(((n1, n2), (n2, n3), (n3, n4)), 1):
        estimate = r - (r + 1) * single * more / fewer if fewer else -1.0
        discounts.append(estimate if 0 < estimate < r else single)
    return np.array(discounts)
