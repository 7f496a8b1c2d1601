"""Attention where each query reads near and salient keys in one rounding and all others in another.

The training graph of the mixed cache: what `mlaflax.cache.hot` does page by page while it decodes, for whole rows
of text at once. Queries go page by page, for each page's choice of salient tokens rests on the attention of the
pages before; cold keys come in blocks with an online softmax, and no array of length x length exists. The backward
pass takes the choices as they were made.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mlaflax.config import MixedConfig
from mlaflax.ops.softmax import NOTHING, Running
from mlaflax.salience import salience, sink_index, strongest

# Cold keys in one block, or one page where that is more.
BLOCK = 256

_wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def tiered_attention(
    q: Float[Array, "b q h n"],
    hot: tuple[Float[Array, "b q h n"], Float[Array, "b q h v"]],
    cold: tuple[Float[Array, "b q h n"], Float[Array, "b q h v"]] | None,
    segment_ids: Int[Array, "b q"],
    *,
    scale: float,
    config: MixedConfig,
) -> tuple[Float[Array, "b q h v"], Int[Array, "pages b e"]]:
    """Causal softmax attention within segments over two roundings of the same keys; softmax in float32.

    Query i of a segment, on page i // t of it, reads `hot` of its own page, of the window before that page and of
    the tokens kept at that page (`mlaflax.salience`), and `cold` of all other tokens up to itself. Segments must
    begin at multiples of the page in their row. Where one does not, what it reads is chosen at the row's pages in
    place of its own.

    Args:
      q: queries.
      hot, cold: keys and values, one head each per query head; without `cold`, all but the hot ones are unseen.
      segment_ids: of queries and keys alike; 0 is padding, which sees nothing and gets 0.
      scale: the softmax scale, applied once, here.

    Returns:
      The output in the values' dtype, and for each page of the rows the indices in the row of the tokens kept at
      it, -1 for none.

    Raises:
      ValueError: shapes that do not belong together.
    """
    for k, v in (hot, cold or hot):
        if q.shape != k.shape or v.shape[:3] != q.shape[:3] or segment_ids.shape != q.shape[:2]:
            raise ValueError(
                f"q {q.shape}, k {k.shape}, v {v.shape} and segment_ids {segment_ids.shape} do not belong together"
            )
    length = q.shape[1]
    padding = -length % _cold_block(config)

    def heads_first(x: Array) -> Array:
        return jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, padding), (0, 0)))

    q, hot_k, hot_v = (heads_first(x) for x in (q, *hot))
    far = None if cold is None else tuple(heads_first(x) for x in cold)
    segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)))
    results: Any = _tiered(q, (hot_k, hot_v), far, segment_ids, scale, config)
    out, kept = results
    return jnp.swapaxes(out[:, :, :length], 1, 2), kept[: -(-length // config.page)]


def _cold_block(config: MixedConfig) -> int:
    return config.page * max(1, BLOCK // config.page)


def _segment_starts(segment_ids: Int[Array, "b k"]) -> Int[Array, "b k"]:
    """The row index at which each token's segment begins."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    begins = jnp.concatenate(
        [jnp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1
    )
    return lax.cummax(jnp.where(begins, index, 0), axis=1)


def _keep(kept, mass, page, segment_ids, starts, config: MixedConfig) -> Int[Array, "b e"]:
    """Row indices of the tokens kept from `page` of the rows on, sinks first, given those kept so far."""
    b, t = kept.shape[0], config.page
    here = page * t
    segment, start = (lax.dynamic_index_in_dim(x, here, 1, keepdims=False) for x in (segment_ids, starts))
    first, segment_page = start[:, None], page - start // t
    sinks = sink_index(segment_page, config)
    sinks = jnp.where(sinks >= 0, first + sinks, -1)
    if not config.salient:
        return sinks
    leaving = (page - config.ring) * t
    index = leaving + jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    index = jnp.concatenate([kept[:, config.sinks :], jnp.where(leaving >= 0, index, -1)], axis=1)
    at = jnp.maximum(index, 0)
    # Only the segment at hand keeps anything.
    mine = (index >= 0) & (jnp.take_along_axis(segment_ids, at, axis=1) == segment[:, None])
    worth = salience(
        jnp.where(mine, index - first, -1), jnp.take_along_axis(mass, at, axis=1), segment_page, config
    )
    place, best = strongest(worth, config.salient)
    salient = jnp.where(best > -jnp.inf, jnp.take_along_axis(index, place, axis=1), -1)
    return jnp.concatenate([sinks, salient], axis=1)


class _Keys(NamedTuple):
    """Some keys of a rounding for one page of queries: with what it takes to see them."""

    k: Float[Array, "b h k n"]
    v: Float[Array, "b h k v"]
    visible: Bool[Array, "b q k"]


class _Rows:
    """The rows of text at hand, cut into what one page of queries reads."""

    def __init__(self, hot, cold, segment_ids, config: MixedConfig):
        self.hot, self.cold, self.segment_ids, self.config = hot, cold, segment_ids, config
        self.width = (
            config.ring * config.page
        )  # near keys, the first of them before the row at its first pages
        self.block = _cold_block(config)

    def near_start(self, page):
        """Row index of the first near key; negative at the first pages."""
        return (page - self.config.ring + 1) * self.config.page

    def _sees(self, page, key_segments, key_index) -> Bool[Array, "b q k"]:
        t = self.config.page
        segment = lax.dynamic_slice_in_dim(self.segment_ids, page * t, t, 1)
        row = page * t + jnp.arange(t)
        same = (segment[:, :, None] == key_segments[:, None, :]) & (segment > 0)[:, :, None]
        return same & (row[:, None] >= key_index) & (key_index >= 0)

    def near(self, page) -> _Keys:
        start = self.near_start(page)
        take = start + jnp.arange(self.width)
        at = jnp.maximum(take, 0)
        k, v = (jnp.take(x, at, axis=2) for x in self.hot)
        return _Keys(k, v, self._sees(page, jnp.take(self.segment_ids, at, axis=1), take))

    def kept(self, page, kept: Int[Array, "b e"]) -> _Keys:
        at = jnp.maximum(kept, 0)
        k, v = (jnp.take_along_axis(x, at[:, None, :, None], axis=2) for x in self.hot)
        segments = jnp.where(kept >= 0, jnp.take_along_axis(self.segment_ids, at, axis=1), -1)
        return _Keys(k, v, self._sees(page, segments, jnp.zeros((), jnp.int32)))

    def cold_block(self, page, block, kept: Int[Array, "b e"]) -> _Keys:
        start = block * self.block
        k, v = (lax.dynamic_slice_in_dim(x, start, self.block, 2) for x in self.cold)
        index = start + jnp.arange(self.block)
        segments = lax.dynamic_slice_in_dim(self.segment_ids, start, self.block, 1)
        visible = self._sees(page, segments, index) & (index < self.near_start(page))
        if self.config.kept:
            b = kept.shape[0]
            place = jnp.where((kept >= start) & (kept < start + self.block), kept - start, self.block)
            free = jnp.ones((b, self.block), bool).at[jnp.arange(b)[:, None], place].set(False, mode="drop")
            visible &= free[:, None]
        return _Keys(k, v, visible)

    def cold_blocks(self, page):
        """Blocks of which a query on that page reads something."""
        return jnp.maximum(0, self.near_start(page) + self.block - 1) // self.block


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _tiered(q, hot, cold, segment_ids, scale, config):
    return _forward(q, hot, cold, segment_ids, scale, config)[0]


def _forward(q, hot, cold, segment_ids, scale, config: MixedConfig):
    b, h, length, _ = q.shape
    t = config.page
    rows = _Rows(hot, cold, segment_ids, config)
    starts = _segment_starts(segment_ids)

    def step(carry, page):
        kept, mass = carry
        if config.kept:
            kept = _keep(kept, mass, page, segment_ids, starts, config)
        qi = lax.dynamic_slice_in_dim(q, page * t, t, 2) * scale

        def add(running: Running, keys: _Keys) -> Running:
            return running.add(
                jnp.where(keys.visible[:, None], _wide("bhqn,bhkn->bhqk", qi, keys.k), -jnp.inf),
                lambda weights: _wide("bhqk,bhkv->bhqv", weights.astype(keys.v.dtype), keys.v),
            )

        near = rows.near(page)
        running = add(Running.begin((b, h, t), hot[1].shape[-1]), near)
        special = rows.kept(page, kept) if config.kept else None
        if special is not None:
            running = add(running, special)
        if cold is not None:
            running = lax.fori_loop(
                0, rows.cold_blocks(page), lambda j, r: add(r, rows.cold_block(page, j, kept)), running
            )
        out, lse = running.end()
        # Padding sees nothing. An endless sum makes its weights, and so its gradients, 0.
        lse = jnp.where(jnp.isfinite(lse), lse, -NOTHING)

        if config.salient and special is not None:

            def attention(keys: _Keys) -> Float[Array, "b k"]:
                every = slice(None, None, config.probe_stride)
                scores = _wide("bhqn,bhkn->bhqk", qi[:, :, every], keys.k)
                weights = jnp.exp(scores - lse[:, :, every, None])
                return jnp.sum(jnp.where(keys.visible[:, None, every], weights, 0.0), axis=(1, 2))

            index = rows.near_start(page) + jnp.arange(rows.width)
            mass = mass.at[:, jnp.where(index >= 0, index, length)].add(attention(near), mode="drop")
            place = jnp.where(kept >= 0, kept, length)
            mass = mass.at[jnp.arange(b)[:, None], place].add(attention(special), mode="drop")
        return (kept, mass), (out.astype(hot[1].dtype), lse, kept)

    start = jnp.full((b, config.kept), -1, jnp.int32), jnp.zeros((b, length))
    _, (out, lse, kept) = lax.scan(step, start, jnp.arange(length // t, dtype=jnp.int32))
    out = jnp.moveaxis(out, 0, 2).reshape(b, h, length, -1)
    lse = jnp.moveaxis(lse, 0, 2).reshape(b, h, length)
    return (out, kept), (q, hot, cold, segment_ids, out, lse, kept)


def _backward(scale, config: MixedConfig, residuals, cotangents):
    q, hot, cold, segment_ids, out, lse, kept = residuals
    d_out, _ = cotangents
    b, h, length, _ = q.shape
    t = config.page
    rows = _Rows(hot, cold, segment_ids, config)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def back(page, keys: _Keys):
        """Gradients of the page's queries (before the scale) and of these keys and values."""
        qi, di, lse_i, delta_i = (lax.dynamic_slice_in_dim(x, page * t, t, 2) for x in (q, d_out, lse, delta))
        scores = _wide("bhqn,bhkn->bhqk", qi * scale, keys.k)
        weights = jnp.where(keys.visible[:, None], jnp.exp(scores - lse_i[..., None]), 0.0)
        dv = _wide("bhqk,bhqv->bhkv", weights.astype(keys.v.dtype), di)
        d_weights = _wide("bhqv,bhkv->bhqk", di, keys.v)
        d_scores = (weights * (d_weights - delta_i[..., None]) * scale).astype(q.dtype)
        return (
            _wide("bhqk,bhkn->bhqn", d_scores, keys.k),
            _wide("bhqk,bhqn->bhkn", d_scores, qi),
            dv,
        )

    def zeros(x: Array) -> Array:
        return jnp.zeros(x.shape, jnp.float32)

    def add_rows(total, part, page):
        at = lax.dynamic_slice_in_dim(total, page * t, t, 2)
        return lax.dynamic_update_slice_in_dim(total, at + part, page * t, 2)

    def hot_page(carry, page):
        dq, dk, dv = carry
        near_q, near_k, near_v = back(page, rows.near(page))
        index = rows.near_start(page) + jnp.arange(rows.width)
        # Keys before the row count as seen nowhere: their gradients are 0.
        index = jnp.maximum(index, 0)
        dk, dv = dk.at[:, :, index].add(near_k), dv.at[:, :, index].add(near_v)
        if config.kept:
            kept_q, kept_k, kept_v = back(page, rows.kept(page, kept[page]))
            near_q += kept_q
            place = jnp.maximum(kept[page], 0)
            each = jnp.arange(b)[:, None]
            # An index array on both sides of a slice brings its dims to the front.
            dk = dk.at[each, :, place].add(jnp.swapaxes(kept_k, 1, 2))
            dv = dv.at[each, :, place].add(jnp.swapaxes(kept_v, 1, 2))
        return (add_rows(dq, near_q, page), dk, dv), None

    pages = length // t
    (dq, dk_hot, dv_hot), _ = lax.scan(
        hot_page, (zeros(q), *map(zeros, hot)), jnp.arange(pages, dtype=jnp.int32)
    )

    d_hot = dk_hot.astype(hot[0].dtype), dv_hot.astype(hot[1].dtype)
    if cold is None:
        return dq.astype(q.dtype), d_hot, None, None

    def cold_keys(dq, block):
        def queries(page, carry):
            dq, dk, dv = carry
            more_q, more_k, more_v = back(page, rows.cold_block(page, block, kept[page]))
            return add_rows(dq, more_q, page), dk + more_k, dv + more_v

        start = dq, *(jnp.zeros((b, h, rows.block, x.shape[-1]), jnp.float32) for x in cold)
        first = jnp.minimum(block * (rows.block // t) + config.ring, pages)
        dq, dk, dv = lax.fori_loop(first, pages, queries, start)
        return dq, (dk, dv)

    dq, d_cold = lax.scan(cold_keys, dq, jnp.arange(length // rows.block, dtype=jnp.int32))
    d_cold = tuple(
        jnp.moveaxis(d, 0, 2).reshape(x.shape).astype(x.dtype) for d, x in zip(d_cold, cold, strict=True)
    )
    return dq.astype(q.dtype), d_hot, d_cold, None


_tiered.defvjp(_forward, _backward)
