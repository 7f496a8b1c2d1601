"""The obvious form of `gqa_decode`: gather every page, one softmax, float32."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from mlaflax.formats import Format
from mlaflax.ops.mla_decode.pages import read_pages, visible_keys


def gqa_decode(
    q: Float[Array, "b q h n"],
    q_pos: Array,
    pool: Mapping[str, Array],
    block_table: Array,
    page_pos: Array,
    mask: Array | None,
    *,
    format: Format,
    scale: float,
) -> tuple[Float[Array, "b q h v"], Float[Array, "b q h"]]:
    h, g = q.shape[2], block_table.shape[1]
    visible = visible_keys(q_pos, page_pos, mask, page_size=pool["rope"].shape[-1])
    outs, lses = [], []
    for head in range(h):
        value, key = read_pages(pool, block_table[:, head // (h // g)], format)
        scores = jnp.einsum("bqn,bnk->bqk", q[:, :, head].astype(jnp.float32), key) * scale
        scores = jnp.where(visible, scores, -jnp.inf)
        peak = jnp.max(scores, axis=-1, keepdims=True)
        peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
        weights = jnp.exp(scores - peak)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        safe = jnp.where(total > 0, total, 1.0)
        outs.append(jnp.einsum("bqk,bkv->bqv", weights / safe, value))
        lses.append(jnp.where(total > 0, peak + jnp.log(safe), -jnp.inf)[..., 0])
    return jnp.stack(outs, axis=2), jnp.stack(lses, axis=2)
