"""Attention where each query reads near and salient keys in one rounding and all others in another.

The training graph of the mixed cache: what `mlaflax.cache.hot` does page by page while it decodes, for whole rows
of text at once. Blocks of queries are pages, written out one after another, for each page's choice of salient
tokens rests on the attention of the pages before. Differentiable as it stands; each block is computed again in the
backward pass, so that no more than one block's scores exist at a time.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mlaflax.config import MixedConfig
from mlaflax.salience import salience, strongest

_wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class KeysValues(NamedTuple):
    """Keys and values of every token in one rounding."""

    k: Float[Array, "b k h n"]
    v: Float[Array, "b k h v"]

    def __getitem__(self, rows) -> "KeysValues":  # pyright: ignore[reportIncompatibleMethodOverride]
        return KeysValues(self.k[:, rows], self.v[:, rows])


def tiered_attention(
    q: Float[Array, "b q h n"],
    hot: tuple[Float[Array, "b q h n"], Float[Array, "b q h v"]],
    cold: tuple[Float[Array, "b q h n"], Float[Array, "b q h v"]],
    segment_ids: Int[Array, "b q"],
    *,
    scale: float,
    config: MixedConfig,
) -> tuple[Float[Array, "b q h v"], Int[Array, "pages b e"]]:
    """Causal softmax attention within segments over two roundings of the same keys; softmax in float32.

    Query i of a segment, on page i // t of it, reads `hot` of its own page, of the window before that page and of
    the tokens kept at that page (`mlaflax.salience`), and `cold` of all other tokens up to itself. Segments must
    begin at multiples of the page in their row. Where one does not, what it keeps is chosen at the row's pages in
    place of its own.

    Args:
      q: queries.
      hot, cold: keys and values, one head each per query head.
      segment_ids: of queries and keys alike; 0 is padding, which sees nothing and gets 0.
      scale: the softmax scale, applied once, here.

    Returns:
      The output, and for each page of the rows the indices in the row of the tokens kept at it, -1 for none.
    """
    b, length, h, _ = q.shape
    t = config.page
    padding = -length % t
    if padding:
        widths = ((0, 0), (0, padding), (0, 0), (0, 0))
        q, (hot_k, hot_v), (cold_k, cold_v) = jax.tree.map(lambda x: jnp.pad(x, widths), (q, hot, cold))
        hot, cold = (hot_k, hot_v), (cold_k, cold_v)
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)))
    hot, cold = KeysValues(*hot), KeysValues(*cold)
    rows = length + padding
    first = _segment_starts(segment_ids)
    kept = jnp.full((b, config.kept), -1, jnp.int32)
    mass = jnp.zeros((b, rows), jnp.float32)

    outs, chosen = [], []
    for page in range(rows // t):
        here = slice(page * t, (page + 1) * t)
        near = slice(max(0, page - config.ring + 1) * t, here.stop)
        if config.kept and near.start:
            leaving = slice(near.start - t, near.start)
            kept = _keep(kept, leaving, mass, segment_ids, first, page, config)
        chosen.append(kept)
        block = jax.checkpoint(functools.partial(_block, here=here, near=near, scale=scale, config=config))
        out, got_near, got_kept = block(q[:, here], hot[: near.stop], cold[: near.start], segment_ids, kept)
        outs.append(out)
        if config.salient:
            mass = mass.at[:, near].add(got_near)
            place = jnp.where(kept >= 0, kept, rows)
            mass = mass.at[jnp.arange(b)[:, None], place].add(got_kept, mode="drop")
    return jnp.concatenate(outs, axis=1)[:, :length].astype(q.dtype), jnp.stack(chosen)


def _segment_starts(segment_ids: Int[Array, "b k"]) -> Int[Array, "b k"]:
    """The row index at which each token's segment begins."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    begins = jnp.concatenate(
        [jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1
    )
    return lax.cummax(jnp.where(begins, index, 0), axis=1)


def _keep(kept, leaving: slice, mass, segment_ids, first, page: int, config: MixedConfig) -> Array:
    """Row indices of the tokens kept from `page` of the rows on."""
    b, t = kept.shape[0], config.page
    index = jnp.concatenate(
        [kept, jnp.broadcast_to(jnp.arange(leaving.start, leaving.stop, dtype=jnp.int32), (b, t))], axis=1
    )
    at = jnp.maximum(index, 0)
    segment, start = segment_ids[:, page * t], first[:, page * t]
    # Only the segment at hand keeps anything.
    mine = (index >= 0) & (jnp.take_along_axis(segment_ids, at, axis=1) == segment[:, None])
    worth = salience(
        jnp.where(mine, index - start[:, None], -1),
        jnp.take_along_axis(mass, at, axis=1),
        page - start // t,
        config,
    )
    place, best = strongest(lax.stop_gradient(worth), config.kept)
    return jnp.where(best > -jnp.inf, jnp.take_along_axis(index, place, axis=1), -1)


def _block(q, hot: KeysValues, cold: KeysValues, segment_ids, kept, *, here, near, scale, config: MixedConfig):
    """Output of one page of queries, and the attention that near and kept tokens get from those that probe."""
    segment = segment_ids[:, here]
    row = jnp.arange(here.start, here.stop)

    def sees(keys) -> Array:
        return (segment[:, :, None] == keys[:, None, :]) & (segment > 0)[:, :, None]

    visible = [sees(segment_ids[:, near]) & (row[:, None] >= jnp.arange(near.start, near.stop))]
    sources = [hot[near]]
    if near.start:
        unkept = sees(segment_ids[:, : near.start])
        if config.kept:
            take = jnp.maximum(kept, 0)
            there = kept >= 0
            visible.append(sees(jnp.where(there, jnp.take_along_axis(segment_ids, take, axis=1), -1)))
            sources.append(
                KeysValues(*(jnp.take_along_axis(x, take[..., None, None], axis=1) for x in hot))
            )
            place = jnp.where(there, kept, near.start)
            free = jnp.ones((q.shape[0], near.start), bool)
            free = free.at[jnp.arange(q.shape[0])[:, None], place].set(False, mode="drop")
            unkept &= free[:, None]
        visible.append(unkept)
        sources.append(cold)

    scores = jnp.concatenate([_wide("bqhn,bkhn->bhqk", q, source.k) for source in sources], axis=-1) * scale
    seen = jnp.concatenate(visible, axis=-1)[:, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    peak = lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, 0.0))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores, 0.0) - peak), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    ends = [sum(v.shape[-1] for v in visible[: i + 1]) for i in range(len(visible) - 1)]
    split = jnp.split(weights, ends, axis=-1)
    out = sum(
        _wide("bhqk,bkhv->bqhv", part.astype(source.v.dtype), source.v)
        for part, source in zip(split, sources, strict=True)
    )
    got = [jnp.sum(lax.stop_gradient(part[:, :, :: config.probe_stride]), axis=(1, 2)) for part in split]
    got_kept = got[1] if len(got) == 3 else jnp.zeros(kept.shape, jnp.float32)
    return out, got[0], got_kept
