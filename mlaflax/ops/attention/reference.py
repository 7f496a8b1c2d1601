"""The obvious form: the whole score matrix, float32."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def attention(
    q: Float[Array, "b q h n"],
    k: Float[Array, "b q h n"],
    v: Float[Array, "b q h v"],
    segment_ids: Int[Array, "b q"],
    *,
    scale: float,
) -> Float[Array, "b q h v"]:
    scores = jnp.einsum("bqhn,bkhn->bhqk", q.astype(jnp.float32), k.astype(jnp.float32)) * scale
    index = jnp.arange(q.shape[1])
    visible = (
        (index[:, None] >= index)
        & (segment_ids[:, :, None] == segment_ids[:, None, :])
        & (segment_ids > 0)[:, :, None]
    )
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bhqk,bkhv->bqhv", weights, v.astype(jnp.float32)).astype(v.dtype)
