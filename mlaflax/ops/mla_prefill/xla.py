"""`mla_prefill` in blocks of pages with an online softmax, for any backend.

One block's keys, values and scores exist at a time, and the loop ends with the last page that any query can see.
"""

import functools
from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from mlaflax.formats import Format
from mlaflax.ops.mla_decode.pages import last_live_page, read_pages, visible_keys
from mlaflax.ops.softmax import Running

# Tokens expanded at a time. Of a chunk's own keys half lie beyond the diagonal, block by block, so
# blocks are smaller than a chunk; much smaller ones leave too little to each product.
BLOCK_TOKENS = 128


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
    b, nq, h, _ = q.shape
    n, v = k_up.shape[1], v_up.shape[1]
    page_size = pool["rope"].shape[-1]
    block = max(1, min(block_table.shape[1], BLOCK_TOKENS // page_size))
    padding = -block_table.shape[1] % block
    if padding:
        widths = ((0, 0), (0, padding))
        block_table = jnp.pad(block_table, widths, constant_values=-1)
        page_pos = jnp.pad(page_pos, widths, constant_values=-1)
        mask = None if mask is None else jnp.pad(mask, (*widths, (0, 0)))

    q = jnp.swapaxes(q.astype(jnp.float32) * scale, 1, 2)  # [b, h, q, n+r]
    q_nope, q_rope = q[..., :n], q[..., n:].reshape(b, h * nq, -1)
    k_up, v_up = k_up.astype(jnp.float32), v_up.astype(jnp.float32)

    def step(i, running: Running) -> Running:
        pages = functools.partial(lax.dynamic_slice_in_dim, start_index=i * block, slice_size=block, axis=1)
        latent, rope = read_pages(pool, pages(block_table), format)
        visible = visible_keys(
            q_pos, pages(page_pos), None if mask is None else pages(mask), page_size=page_size
        )
        keys = jnp.einsum("hnc,bkc->bhnk", k_up, latent)
        values = jnp.einsum("bkc,hvc->bhkv", latent, v_up)
        # The rope key is one for all heads: one product of all their rows.
        scores = jnp.einsum("bmr,brk->bmk", q_rope, rope).reshape(b, h, nq, -1)
        scores += jnp.einsum("bhqn,bhnk->bhqk", q_nope, keys)
        scores = jnp.where(visible[:, None], scores, -jnp.inf)
        return running.add(scores, lambda w: jnp.einsum("bhqk,bhkv->bhqv", w, values))

    trips = (last_live_page(q_pos, page_pos) + block - 1) // block
    out, lse = lax.fori_loop(0, trips, step, Running.begin((b, h, nq), v)).end()
    return jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2)
