"""Attention in blocks of queries and keys with an online softmax (arXiv:2205.14135), for any backend.

Blocks above the diagonal are not computed, forward or backward; no array of length x length exists beyond 512.
Key dims and value dims may differ, as they do in latent attention.

Up to 512 tokens, blocks of queries are written out one by one, each with all its keys at once: about half
the time of the loops on CPU. Longer sequences loop over blocks of queries and of keys.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mlaflax.ops.softmax import NOTHING, Running

# Rows of queries and of keys in one block of the loops. A block's scores over all heads stay within a CPU's cache.
BLOCK = 256

# Most blocks of queries written out, and the rows in one of them. Their scores may all exist at once.
UNROLLED, SMALL = 8, 64

_wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


# --- Loops over blocks -----------------------------------------------------------------------------------------


def _scores(q, k, q_segment, k_segment, q_start, k_start, scale):
    """Scaled scores `[b, h, q, k]` in float32 and their visibility `[b, 1, q, k]`."""
    scores = jnp.einsum("bhqn,bhkn->bhqk", q, k, preferred_element_type=jnp.float32) * scale
    q_index = q_start + jnp.arange(q.shape[2])
    k_index = k_start + jnp.arange(k.shape[2])
    visible = (
        (q_index[:, None] >= k_index)
        & (q_segment[:, :, None] == k_segment[:, None, :])
        & (q_segment > 0)[:, :, None]
    )
    return scores, visible[:, None]


def _block(x: Array, i: Array | int, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, i * size, size, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _looped(q, k, v, segment_ids, scale, block):
    return _looped_fwd(q, k, v, segment_ids, scale, block)[0]


def _looped_fwd(q, k, v, segment_ids, scale, block):
    b, h, length, _ = q.shape
    v_dim = v.shape[-1]

    def per_query_block(i):
        qi, si = _block(q, i, block, 2), _block(segment_ids, i, block, 1)

        def per_key_block(j, running: Running) -> Running:
            kj, vj, sj = _block(k, j, block, 2), _block(v, j, block, 2), _block(segment_ids, j, block, 1)
            scores, visible = _scores(qi, kj, si, sj, i * block, j * block, scale)
            return running.add(
                jnp.where(visible, scores, -jnp.inf),
                lambda weights: _wide("bhqk,bhkv->bhqv", weights.astype(v.dtype), vj),
            )

        out, lse = lax.fori_loop(0, i + 1, per_key_block, Running.begin((b, h, block), v_dim)).end()
        # Padding sees nothing: a finite sum keeps its weights 0, not NaN, in the backward pass.
        return out.astype(v.dtype), jnp.maximum(lse, NOTHING)

    blocks = length // block
    out, lse = lax.map(per_query_block, jnp.arange(blocks))
    out = jnp.moveaxis(out, 0, 2).reshape(b, h, length, v_dim)
    lse = jnp.moveaxis(lse, 0, 2).reshape(b, h, length)
    return out, (q, k, v, segment_ids, out, lse)


def _looped_bwd(scale, block, residuals, d_out):
    q, k, v, segment_ids, out, lse = residuals
    blocks = q.shape[2] // block
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def per_key_block(dq, j):
        kj, vj, sj = _block(k, j, block, 2), _block(v, j, block, 2), _block(segment_ids, j, block, 1)

        def per_query_block(i, carry):
            dq, dk, dv = carry
            qi, si = _block(q, i, block, 2), _block(segment_ids, i, block, 1)
            d_out_i, lse_i, delta_i = (_block(x, i, block, 2) for x in (d_out, lse, delta))
            scores, visible = _scores(qi, kj, si, sj, i * block, j * block, scale)
            weights = jnp.where(visible, jnp.exp(scores - lse_i[..., None]), 0.0)
            dv += _wide("bhqk,bhqv->bhkv", weights.astype(v.dtype), d_out_i)
            d_weights = _wide("bhqv,bhkv->bhqk", d_out_i, vj)
            d_scores = (weights * (d_weights - delta_i[..., None]) * scale).astype(q.dtype)
            dk += _wide("bhqk,bhqn->bhkn", d_scores, qi)
            dq_i = _block(dq, i, block, 2) + _wide("bhqk,bhkn->bhqn", d_scores, kj)
            return lax.dynamic_update_slice_in_dim(dq, dq_i, i * block, 2), dk, dv

        start = (dq, jnp.zeros(kj.shape, jnp.float32), jnp.zeros(vj.shape, jnp.float32))
        dq, dk, dv = lax.fori_loop(j, blocks, per_query_block, start)
        return dq, (dk, dv)

    start = jnp.zeros(q.shape, jnp.float32)
    dq, (dk, dv) = lax.scan(per_key_block, start, jnp.arange(blocks))

    def joined(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 2).reshape(x.shape[1], x.shape[2], -1, x.shape[-1])

    return dq.astype(q.dtype), joined(dk).astype(k.dtype), joined(dv).astype(v.dtype), None


_looped.defvjp(_looped_fwd, _looped_bwd)


# --- Blocks of queries written out -----------------------------------------------------------------------------


def _bias(segment_ids: Array, rows: slice) -> Float[Array, "b 1 q k"]:
    """0 where the queries `rows` see a key up to the last of them, `NOTHING` elsewhere."""
    q_segment, k_segment = segment_ids[:, rows], segment_ids[:, : rows.stop]
    visible = (jnp.arange(rows.start, rows.stop)[:, None] >= jnp.arange(rows.stop)) & (
        q_segment[:, :, None] == k_segment[:, None, :]
    )
    return jnp.where(visible, 0.0, NOTHING)[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _unrolled(q, k, v, segment_ids, scale, block):
    return _unrolled_fwd(q, k, v, segment_ids, scale, block)[0]


def _unrolled_fwd(q, k, v, segment_ids, scale, block):
    outs, sums = [], []
    for start in range(0, q.shape[2], block):
        rows = slice(start, start + block)
        scores = _wide("bhqn,bhkn->bhqk", q[:, :, rows], k[:, :, : rows.stop]) * scale
        scores += _bias(segment_ids, rows)
        peak = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        outs.append(_wide("bhqk,bhkv->bhqv", weights.astype(v.dtype), v[:, :, : rows.stop]) / total)
        sums.append(peak + jnp.log(total))
    valid = (segment_ids > 0)[:, None, :, None]
    out = jnp.where(valid, jnp.concatenate(outs, 2), 0).astype(v.dtype)
    # Padding sees the padding before it. An endless sum makes its weights, and so its gradients, 0.
    lse = jnp.where(valid, jnp.concatenate(sums, 2), -NOTHING)
    return out, (q, k, v, segment_ids, out, lse)


def _unrolled_bwd(scale, block, residuals, d_out):
    q, k, v, segment_ids, out, lse = residuals
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    # Gradients of keys and values are summed with their positions last: `[n, q] [q, k]` transposes only what is
    # narrow, where `[q, k]^T [q, n]` would transpose the weights.
    q_t, d_out_t = jnp.swapaxes(q, 2, 3), jnp.swapaxes(d_out, 2, 3)
    dq = []
    dk_t, dv_t = (jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2]), jnp.float32) for x in (k, v))
    for start in range(0, q.shape[2], block):
        rows = slice(start, start + block)
        keys = slice(rows.stop)
        ki, vi = k[:, :, keys], v[:, :, keys]
        scores = _wide("bhqn,bhkn->bhqk", q[:, :, rows], ki) * scale + _bias(segment_ids, rows)
        weights = jnp.exp(scores - lse[:, :, rows])
        d_weights = _wide("bhqv,bhkv->bhqk", d_out[:, :, rows], vi)
        d_scores = (weights * (d_weights - delta[:, :, rows])).astype(q.dtype)
        dq.append(_wide("bhqk,bhkn->bhqn", d_scores, ki))
        dk_t = dk_t.at[..., keys].add(_wide("bhnq,bhqk->bhnk", q_t[..., rows], d_scores))
        dv_t = dv_t.at[..., keys].add(_wide("bhvq,bhqk->bhvk", d_out_t[..., rows], weights.astype(v.dtype)))
    dq = jnp.concatenate(dq, 2) * scale
    dk, dv = jnp.swapaxes(dk_t, 2, 3) * scale, jnp.swapaxes(dv_t, 2, 3)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_unrolled.defvjp(_unrolled_fwd, _unrolled_bwd)


def _choose(length: int) -> tuple[Any, int]:
    """The form for this length, and the rows in its blocks."""
    return (_unrolled, min(SMALL, length)) if length <= UNROLLED * SMALL else (_looped, BLOCK)


def attention(
    q: Float[Array, "b q h n"],
    k: Float[Array, "b q h n"],
    v: Float[Array, "b q h v"],
    segment_ids: Int[Array, "b q"],
    *,
    scale: float,
    block: int | None = None,
) -> Float[Array, "b q h v"]:
    """`block` rows make up one block of the loops; None lets the length choose between them and the other form."""
    length = q.shape[1]
    form, block = _choose(length) if block is None else (_looped, min(block, length))
    padding = -length % block
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    if padding:
        q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (q, k, v))
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)))  # segment 0: padding, sees nothing
    out: Array = form(q, k, v, segment_ids, scale, block)
    return jnp.swapaxes(out[:, :, :length], 1, 2)
