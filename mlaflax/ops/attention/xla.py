"""Attention in blocks of queries and keys with an online softmax (arXiv:2205.14135), for any backend.

No array of length x length exists, forward or backward; blocks above the diagonal are not computed.
Key dims and value dims may differ, as they do in latent attention.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Rows of queries and of keys in one block. A block's scores over all heads stay within a CPU's cache.
BLOCK = 256

NOTHING = -1e30  # "no key seen yet", finite so that differences are not NaN


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
def _attention(q, k, v, segment_ids, scale, block):
    return _attention_fwd(q, k, v, segment_ids, scale, block)[0]


def _attention_fwd(q, k, v, segment_ids, scale, block):
    b, h, length, _ = q.shape
    v_dim = v.shape[-1]

    def per_query_block(i):
        qi, si = _block(q, i, block, 2), _block(segment_ids, i, block, 1)

        def per_key_block(j, carry):
            peak, total, acc = carry
            kj, vj, sj = _block(k, j, block, 2), _block(v, j, block, 2), _block(segment_ids, j, block, 1)
            scores, visible = _scores(qi, kj, si, sj, i * block, j * block, scale)
            scores = jnp.where(visible, scores, NOTHING)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
            weights = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0.0)
            keep = jnp.exp(peak - new_peak)
            total = total * keep + jnp.sum(weights, axis=-1)
            new = jnp.einsum(
                "bhqk,bhkv->bhqv", weights.astype(v.dtype), vj, preferred_element_type=jnp.float32
            )
            return new_peak, total, acc * keep[..., None] + new

        rows = (b, h, block)
        start = (jnp.full(rows, NOTHING), jnp.zeros(rows), jnp.zeros((*rows, v_dim)))
        peak, total, acc = lax.fori_loop(0, i + 1, per_key_block, start)
        safe = jnp.where(total > 0, total, 1.0)
        return (acc / safe[..., None]).astype(v.dtype), peak + jnp.log(safe)

    blocks = length // block
    out, lse = lax.map(per_query_block, jnp.arange(blocks))
    out = jnp.moveaxis(out, 0, 2).reshape(b, h, length, v_dim)
    lse = jnp.moveaxis(lse, 0, 2).reshape(b, h, length)
    return out, (q, k, v, segment_ids, out, lse)


def _attention_bwd(scale, block, residuals, d_out):
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
            wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
            dv += wide("bhqk,bhqv->bhkv", weights.astype(v.dtype), d_out_i)
            d_weights = wide("bhqv,bhkv->bhqk", d_out_i, vj)
            d_scores = (weights * (d_weights - delta_i[..., None]) * scale).astype(q.dtype)
            dk += wide("bhqk,bhqn->bhkn", d_scores, qi)
            dq_i = _block(dq, i, block, 2) + wide("bhqk,bhkn->bhqn", d_scores, kj)
            return lax.dynamic_update_slice_in_dim(dq, dq_i, i * block, 2), dk, dv

        start = (dq, jnp.zeros(kj.shape, jnp.float32), jnp.zeros(vj.shape, jnp.float32))
        dq, dk, dv = lax.fori_loop(j, blocks, per_query_block, start)
        return dq, (dk, dv)

    start = jnp.zeros(q.shape, jnp.float32)
    dq, (dk, dv) = lax.scan(per_key_block, start, jnp.arange(blocks))

    def joined(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 2).reshape(x.shape[1], x.shape[2], -1, x.shape[-1])

    return dq.astype(q.dtype), joined(dk).astype(k.dtype), joined(dv).astype(v.dtype), None


_attention.defvjp(_attention_fwd, _attention_bwd)


def attention(
    q: Float[Array, "b q h n"],
    k: Float[Array, "b q h n"],
    v: Float[Array, "b q h v"],
    segment_ids: Int[Array, "b q"],
    *,
    scale: float,
    block: int = BLOCK,
) -> Float[Array, "b q h v"]:
    length = q.shape[1]
    block = min(block, length)
    padding = -length % block
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    if padding:
        q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (q, k, v))
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)))  # segment 0: padding, sees nothing
    out: Array = _attention(q, k, v, segment_ids, scale, block)
    return jnp.swapaxes(out[:, :, :length], 1, 2)
