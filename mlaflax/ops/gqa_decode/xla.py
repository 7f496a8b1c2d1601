"""`gqa_decode` in blocks of pages with an online softmax, for any backend.

Only one block is unpacked at a time, and the loop ends with the last page that any query can see: work and memory
follow the live length, not the table's.
"""

import functools
from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlaflax.formats import Format
from mlaflax.ops.mla_decode.pages import last_live_page, read_pages, visible_keys
from mlaflax.ops.softmax import Running

# Float32 scores held at a time, over the whole batch: a few MiB.
SCORES_PER_BLOCK = 1 << 20
# Float32 keys and values unpacked at a time, over the whole batch, and tokens of one head. With fewer, the loop's
# own overhead shows; with more, they fall out of a CPU's cache between unpacking and the products.
MAX_BLOCK_NUMBERS = 1 << 19
MAX_BLOCK_TOKENS = 1024


def pages_per_block(heads: int, rows: int, width: int, num_pages: int, page_size: int) -> int:
    """Pages of each of `heads` KV heads, of all sequences, read in one step.

    Args:
      heads: KV heads times sequences.
      rows: queries that score each token of one head.
      width: dims of a key and a value together.
    """
    tokens = min(MAX_BLOCK_TOKENS, MAX_BLOCK_NUMBERS // (heads * width), SCORES_PER_BLOCK // (heads * rows))
    return max(1, min(num_pages, tokens // page_size))


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
    b, nq, h, n = q.shape
    g, m = block_table.shape[1], h // block_table.shape[1]
    page_size, v = pool["rope"].shape[-1], format.latent_dims(pool)
    block = pages_per_block(b * g, nq * m, n + v, page_pos.shape[1], page_size)
    padding = -page_pos.shape[1] % block
    if padding:
        widths = ((0, 0), (0, padding))
        block_table = jnp.pad(block_table, ((0, 0), *widths), constant_values=-1)
        page_pos = jnp.pad(page_pos, widths, constant_values=-1)
        mask = None if mask is None else jnp.pad(mask, (*widths, (0, 0)))

    # One row of pages, one matrix of queries for each KV head of each sequence: pages are never transposed.
    tables = block_table.reshape(b * g, -1)
    q = (q.astype(jnp.float32) * scale).reshape(b, nq, g, m, n)
    q = jnp.swapaxes(q, 1, 2).reshape(b * g, nq * m, n)

    def bias(page_pos: Array, mask: Array | None) -> Float[Array, "b q k"]:
        visible = visible_keys(q_pos, page_pos, mask, page_size=page_size)
        return jnp.where(visible, 0.0, -jnp.inf)

    # For one query it is a row of the table's length, which is read faster than worked out in the loop.
    whole_bias = lax.optimization_barrier(bias(page_pos, mask)) if nq == 1 else None

    def step(i, running: Running) -> Running:
        pages = functools.partial(lax.dynamic_slice_in_dim, start_index=i * block, slice_size=block, axis=1)
        value, key = read_pages(pool, pages(tables), format)
        size = block * page_size
        if whole_bias is not None:
            hide = lax.dynamic_slice_in_dim(whole_bias, i * size, size, axis=2)
        else:
            hide = bias(pages(page_pos), None if mask is None else pages(mask))
        scores = jnp.einsum("hmn,hnk->hmk", q, key).reshape(b, g, nq, m, size)
        scores = (scores + hide[:, None, :, None]).reshape(b * g, nq * m, size)
        return running.add(scores, lambda weights: jnp.einsum("hmk,hkv->hmv", weights, value))

    trips = (last_live_page(q_pos, page_pos) + block - 1) // block
    out, lse = lax.fori_loop(0, trips, step, Running.begin((b * g, nq * m), v)).end()

    def by_query(x: Array) -> Array:
        x = jnp.swapaxes(x.reshape(b, g, nq, m, -1), 1, 2)
        return x.reshape(b, nq, h, -1)

    return by_query(out), by_query(lse)[..., 0]
