"""The obvious form of `mla_decode`: gather every page, one softmax, float32. Differentiable as it stands."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from mlaflax.formats import Format
from mlaflax.ops.mla_decode.pages import read_pages, visible_keys


def mla_decode(
    q: Float[Array, "b q h c+r"],
    q_pos: Array,
    pool: Mapping[str, Array],
    block_table: Array,
    page_pos: Array,
    mask: Array | None,
    *,
    format: Format,
    scale: float,
) -> tuple[Float[Array, "b q h c"], Float[Array, "b q h"]]:
    latent, rope = read_pages(pool, block_table, format)
    c = latent.shape[-1]
    q = q.astype(jnp.float32)
    scores = jnp.einsum("bqhc,bkc->bqhk", q[..., :c], latent) + jnp.einsum("bqhr,brk->bqhk", q[..., c:], rope)
    visible = visible_keys(q_pos, page_pos, mask, page_size=rope.shape[-1] // block_table.shape[1])
    scores = jnp.where(visible[:, :, None], scores * scale, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1)
    seen = total > 0
    out = jnp.einsum("bqhk,bkc->bqhc", weights, latent) / jnp.where(seen, total, 1.0)[..., None]
    lse = jnp.where(seen, peak[..., 0] + jnp.log(jnp.where(seen, total, 1.0)), -jnp.inf)
    return out, lse
