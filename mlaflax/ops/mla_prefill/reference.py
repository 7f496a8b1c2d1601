"""The obvious form of `mla_prefill`: all keys and values expanded, one softmax, float32."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array

from mlaflax.formats import Format
from mlaflax.ops.mla_decode.pages import read_pages, visible_keys


def mla_prefill(
    q: Array,
    q_pos: Array,
    k_up: Array,
    v_up: Array,
    pool: Mapping[str, Array],
    block_table: Array,
    page_pos: Array,
    mask: Array | None,
    format: Format,
    scale: float,
) -> tuple[Array, Array]:
    latent, rope = read_pages(pool, block_table, format)
    n = k_up.shape[1]
    q = q.astype(jnp.float32)
    keys = jnp.einsum("bkc,hnc->bkhn", latent, k_up)
    values = jnp.einsum("bkc,hvc->bkhv", latent, v_up)
    scores = jnp.einsum("bqhn,bkhn->bqhk", q[..., :n], keys) + jnp.einsum("bqhr,brk->bqhk", q[..., n:], rope)
    visible = visible_keys(q_pos, page_pos, mask, page_size=rope.shape[-1] // block_table.shape[1])
    scores = jnp.where(visible[:, :, None], scores * scale, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1)
    safe = jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("bqhk,bkhv->bqhv", weights, values) / safe[..., None]
    return out, jnp.where(total > 0, peak[..., 0] + jnp.log(safe), -jnp.inf)
