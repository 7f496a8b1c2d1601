"""Choosing the next token: greedy, or a seeded draw after temperature, top-k, top-p and min-p.

The filters act in that order, the order of Hugging Face's warpers. Every filter is a threshold on the
tempered logits:

* top-k keeps the k most probable tokens and whatever ties with the last of them;
* top-p keeps a token when the tokens *strictly* more probable than it hold less than `top_p` of the mass
  that top-k left, so tokens of equal probability stay or go together (where a sort would break the tie
  by its whim, as Hugging Face does) and the most probable token always stays;
* min-p keeps the tokens with at least `min_p` times the probability of the most probable one.

Sorting a vocabulary costs tens of milliseconds per sequence on CPU, so nothing here does. The largest
`CANDIDATES` logits are found by ranking blocks of the vocabulary by their maximum, which decides almost
every real distribution; a row that they do not decide takes its exact threshold by bisection over the
bits of the float, 31 passes whatever the vocabulary. Work that no row asks for is skipped at run time;
shapes never change, so neither do the compiled programs.
"""

import dataclasses
import numbers
import typing
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from mlaflax.config import require

MAX_LOGPROBS = 20
CANDIDATES = 64
_BLOCK = 128
_INF_BITS = 0x7F800000


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    No field causes recompilation: those that reach the device travel as arrays (`SamplingArrays`), the
    others act on the host. Requests with any mixture of values share one compiled step.

    Attributes:
      temperature: divides the logits; 0 takes the most probable token and ignores the filters.
      top_k: keep the k most probable tokens; 0 keeps all.
      top_p: keep the most probable tokens that together hold this much mass; 1 keeps all.
      min_p: keep tokens with at least this share of the best token's probability; 0 keeps all.
      seed: of this request's draws, 0 <= seed < 2**32. The same seed gives the same draws in any batch.
      max_tokens: the request ends with reason `length` after this many generated tokens.
      stop: the request ends with reason `stop` before any of these strings; they are not emitted.
      logprobs: how many most probable alternatives to report for each token, 0 to 20.
      ignore_eos: go on past the end-of-text token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    ignore_eos: bool = False

    def __post_init__(self):
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            require(_is_number(value), name, value, "must be a number")
        t = self.temperature
        require(0 <= t <= 1e30, "temperature", t, "must be 0 (greedy) or more, and finite")
        require(
            _is_int(self.top_k) and self.top_k >= 0,
            "top_k",
            self.top_k,
            "must be an integer, 0 (off) or more",
        )
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must lie above 0 and not exceed 1 (off)")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "must lie between 0 (off) and 1")
        require(
            _is_int(self.seed) and 0 <= self.seed < 2**32,
            "seed",
            self.seed,
            "must be an integer between 0 and 4294967295",
        )
        require(
            _is_int(self.max_tokens) and self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "must be an integer, at least 1",
        )
        require(
            isinstance(self.stop, list | tuple) and all(isinstance(s, str) and s for s in self.stop),
            "stop",
            self.stop,
            "must be a tuple of strings, none of them empty",
        )
        require(
            _is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            self.logprobs,
            f"must be an integer between 0 and {MAX_LOGPROBS}",
        )


def _is_number(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_int(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class SamplingArrays(NamedTuple):
    """The device's part of `SamplingParams`, one entry per sequence of the batch; a pytree."""

    temperature: Float32[Array, " b"]
    top_k: Int32[Array, " b"]
    top_p: Float32[Array, " b"]
    min_p: Float32[Array, " b"]
    seed: UInt32[Array, " b"]
    logprobs: Int32[Array, " b"]

    @classmethod
    def stack(cls, params: Sequence[SamplingParams | None]) -> "SamplingArrays":
        """One entry per slot, as NumPy arrays; None (an empty slot) is greedy, which costs nothing."""
        rows = [p if p is not None else _EMPTY for p in params]
        columns = (
            np.array([p.temperature for p in rows], np.float32),
            # int32 holds it, and a larger k keeps every token of any vocabulary too.
            np.array([min(p.top_k, 2**31 - 1) for p in rows], np.int32),
            np.array([p.top_p for p in rows], np.float32),
            np.array([p.min_p for p in rows], np.float32),
            np.array([p.seed for p in rows], np.uint32),
            np.array([p.logprobs for p in rows], np.int32),
        )
        return cls(*typing.cast(tuple[jax.Array, ...], columns))


_EMPTY = SamplingParams(temperature=0.0)


class Sampled(NamedTuple):
    """What `sample` returns.

    Attributes:
      token: the chosen token of each row.
      logprob: its log-probability.
      top_logprobs: the most probable tokens' log-probabilities, falling; -inf where there are fewer, and
        everywhere when no row asks for any.
      top_ids: their ids, -1 where there is none; the lower id first among equals.
    """

    token: Int32[Array, " b"]
    logprob: Float32[Array, " b"]
    top_logprobs: Float32[Array, "b 20"]
    top_ids: Int32[Array, "b 20"]


def sample(logits: Float[Array, "b w"], arrays: SamplingArrays, step_index: Int32[Array, " b"]) -> Sampled:
    """The next token of each row. Pure, to be called inside a jitted step.

    A draw's key is `fold_in(key(seed), step_index)` of its own row and everything else is computed row by
    row, so a sequence's tokens depend neither on its batch nor on its slot.

    Log-probabilities are of the model's own distribution, before temperature and filters, as in the
    OpenAI API; the chosen token's is returned whether asked for or not.

    Args:
      logits: `[b, w]`, taken as float32. -inf excludes a token; each row needs one finite logit.
      arrays: how each row is sampled.
      step_index: int32 `[b]`, the number of tokens that this sequence has generated before this one.
    """
    w = logits.shape[1]
    row = _rank(logits, arrays)

    def greedy():
        block = jnp.argmax(row.block_max, 1)
        within = jnp.take_along_axis(row.blocks, block[:, None, None], 1)[:, 0]
        return (block * _BLOCK + jnp.argmax(within, 1)).astype(jnp.int32)

    def drawn():
        return jnp.where(row.draws, _draw(_weights(row, arrays, w), arrays.seed, step_index), greedy())

    token = lax.cond(jnp.any(row.draws), drawn, greedy)
    log_total = row.best + jnp.log(jnp.exp(row.blocks - row.best[:, None, None]).sum((1, 2)))
    logprob = jnp.take_along_axis(row.blocks.reshape(len(token), -1), token[:, None], 1)[:, 0] - log_total
    top_logprobs = row.values[:, :MAX_LOGPROBS] - log_total[:, None]
    top_ids = jnp.where(jnp.isneginf(top_logprobs), -1, row.ids[:, :MAX_LOGPROBS])
    return Sampled(token, logprob, top_logprobs, top_ids)


def probabilities(logits: Float[Array, "b w"], arrays: SamplingArrays) -> Float32[Array, "b w"]:
    """The distribution that `sample` draws each row from, after temperature and filters.

    A greedy row is an even mixture of its most probable tokens (one, unless logits tie).
    """
    b, w = logits.shape
    row = _rank(logits, arrays)
    weight = jnp.where(
        row.draws[:, None, None],
        _weights(row, arrays, w),
        (row.blocks == row.best[:, None, None]).astype(jnp.float32),
    )
    return (weight / weight.sum((1, 2), keepdims=True)).reshape(b, -1)[:, :w]


class _Ranked(NamedTuple):
    """Logits in blocks, padded with tokens that cannot be chosen, and what any row's choice starts from."""

    blocks: Float32[Array, "b blocks 128"]
    block_max: Float32[Array, "b blocks"]
    best: Float32[Array, " b"]
    values: Float32[Array, "b candidates"]
    ids: Int32[Array, "b candidates"]
    draws: Bool[Array, " b"]
    filters: Bool[Array, " b"]


def _rank(logits: Float[Array, "b w"], arrays: SamplingArrays) -> _Ranked:
    b, w = logits.shape
    padded = jnp.pad(logits.astype(jnp.float32), ((0, 0), (0, -w % _BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(b, -1, _BLOCK)
    block_max = blocks.max(2)
    draws = arrays.temperature > 0
    filters = draws & (((arrays.top_k > 0) & (arrays.top_k < w)) | (arrays.top_p < 1))
    wanted = jnp.any(filters | (arrays.logprobs > 0))
    values, ids = lax.cond(wanted, _largest, _no_candidates, blocks, block_max)
    return _Ranked(blocks, block_max, block_max.max(1), values, ids, draws, filters)


def _largest(
    blocks: Float32[Array, "b blocks 128"], block_max: Float32[Array, "b blocks"]
) -> tuple[Float32[Array, "b candidates"], Int32[Array, "b candidates"]]:
    """The `CANDIDATES` largest logits of each row with their ids, falling, the lower id first among equals.

    An element of the n largest lies in one of the n blocks of largest maximum: every block ranked before
    its own holds an element that ranks before it. So two small selections replace one over the vocabulary.
    """
    b, count, _ = blocks.shape
    _, chosen = lax.top_k(block_max, min(CANDIDATES, count))
    chosen = jnp.sort(chosen, 1)  # ids rise along the gathered row, so top_k breaks ties by id
    gathered = jnp.take_along_axis(blocks, chosen[:, :, None], 1)
    gathered_ids = chosen[:, :, None] * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)[None, None]
    values, at = lax.top_k(gathered.reshape(b, -1), CANDIDATES)
    return values, jnp.take_along_axis(gathered_ids.reshape(b, -1), at, 1)


def _no_candidates(blocks, block_max):
    shape = (blocks.shape[0], CANDIDATES)
    return jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, -1, jnp.int32)


def _weights(row: _Ranked, arrays: SamplingArrays, vocab_size: int) -> Float32[Array, "b blocks 128"]:
    """Unnormalised probabilities after temperature and filters; meaningless in greedy rows."""
    temperature = jnp.where(row.draws, arrays.temperature, 1.0)
    # Distances below the best token, tempered: from 0, the best, up to inf. Subtracting first keeps the
    # smallest temperatures finite; being no less than 0, they order as their bits do.
    distance = (row.best[:, None, None] - row.blocks) / temperature[:, None, None]
    near = (row.best[:, None] - row.values) / temperature[:, None]
    weight = jnp.exp(-distance)
    cut = lax.cond(
        jnp.any(row.filters),
        lambda: _cut_top_k_top_p(distance, weight, near, arrays, vocab_size),
        lambda: jnp.full_like(row.best, jnp.inf),
    )
    cut = jnp.minimum(jnp.where(row.filters, cut, jnp.inf), -jnp.log(arrays.min_p))
    return jnp.where(distance <= cut[:, None, None], weight, 0)


def _draw(
    weight: Float32[Array, "b blocks 128"], seed: UInt32[Array, " b"], step_index: Int32[Array, " b"]
) -> Int32[Array, " b"]:
    """A token of each row with probability proportional to its weight.

    The inverse of the cumulative distribution in two stages, the block and then the token in it, each with
    a uniform number of its own: cheaper than noise for every token, and 23 bits resolve improbable tokens
    relative to their block rather than to the whole vocabulary.
    """

    def uniforms(seed, step):
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step), (2,))

    uniform = jax.vmap(uniforms)(seed, step_index)
    block = _invert(weight.sum(2), uniform[:, 0])
    within = jnp.take_along_axis(weight, block[:, None, None], 1)[:, 0]
    return block * _BLOCK + _invert(within, uniform[:, 1])


def _invert(weight: Float32[Array, "b n"], uniform: Float32[Array, " b"]) -> Int32[Array, " b"]:
    total = jnp.cumsum(weight, 1)
    # A parallel prefix sum need not be monotone to the last bit: never land on a weight of 0.
    hit = (total > (uniform * total[:, -1])[:, None]) & (weight > 0)
    return jnp.where(hit.any(1), jnp.argmax(hit, 1), jnp.argmax(weight, 1)).astype(jnp.int32)


def _cut_top_k_top_p(
    distance: Float32[Array, "b blocks 128"],
    weight: Float32[Array, "b blocks 128"],
    near: Float32[Array, "b candidates"],
    arrays: SamplingArrays,
    vocab_size: int,
) -> Float32[Array, " b"]:
    """The largest distance that top-k, then top-p keep.

    Each row takes the candidates' answer when they decide it and bisection's when they do not, by its own
    values alone, so that a neighbour cannot change a sequence by the last bit of a sum.
    """
    count = near.shape[1]
    k_on = (arrays.top_k > 0) & (arrays.top_k < vocab_size)
    k_slow = k_on & (arrays.top_k > count)
    kth = jnp.take_along_axis(near, jnp.clip(arrays.top_k - 1, 0, count - 1)[:, None], 1)[:, 0]
    searched = _bisect(
        k_slow, near[:, -1], lambda cut: (distance < cut[:, None, None]).sum((1, 2)) < arrays.top_k
    )
    k_cut = jnp.where(k_on, jnp.where(k_slow, searched, kth), jnp.inf)

    left = jnp.where(distance <= k_cut[:, None, None], weight, 0)
    needed = arrays.top_p * left.sum((1, 2))
    near_weight = jnp.where(near <= k_cut[:, None], jnp.exp(-near), 0)
    held = jnp.cumsum(near_weight, 1)
    p_on = arrays.top_p < 1
    p_slow = p_on & (held[:, -1] < needed) & (k_cut > near[:, -1]) & (vocab_size > count)
    # The last candidate with less than the needed mass before it; tokens that tie with it stay too.
    before = jnp.concatenate([jnp.zeros_like(held[:, :1]), held[:, :-1]], 1)
    last = jnp.maximum((before < needed[:, None]).sum(1) - 1, 0)
    nucleus = jnp.take_along_axis(near, last[:, None], 1)[:, 0]
    searched = _bisect(
        p_slow,
        near[:, -1],
        lambda cut: jnp.where(distance < cut[:, None, None], left, 0).sum((1, 2)) < needed,
    )
    p_cut = jnp.where(p_on, jnp.where(p_slow, searched, nucleus), jnp.inf)
    return jnp.minimum(k_cut, p_cut)


def _bisect(rows: Bool[Array, " b"], low: Float32[Array, " b"], keeps) -> Float32[Array, " b"]:
    """The largest distance that `keeps` accepts in each of `rows`, exact to the bit; any number elsewhere.

    `keeps` must accept `low` and, once it refuses, refuse every larger distance.
    """

    def step(state):
        low, high = state
        middle = low + (high - low) // 2
        accepted = keeps(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(accepted, middle, low), jnp.where(accepted, high, middle)

    def unfinished(state):
        low, high = state
        return jnp.any(rows & (high - low > 1))

    start = lax.bitcast_convert_type(low, jnp.int32)
    end = jnp.full_like(start, _INF_BITS + 1)
    low_bits, _ = lax.while_loop(unfinished, step, (start, end))
    return lax.bitcast_convert_type(low_bits, jnp.float32)
