"""`mla_decode` in blocks of pages with an online softmax, for any backend.

Only one block is unpacked at a time, and the loop ends with the last page that any query can see: work
and memory follow the live length, not the table's. The backward pass is that of the reference form.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlaflax.formats import Format
from mlaflax.ops.mla_decode import reference
from mlaflax.ops.mla_decode.pages import last_live_page, read_pages, visible_keys
from mlaflax.ops.softmax import Running

# Float32 scores held at a time, over the whole batch: a few MiB.
SCORES_PER_BLOCK = 1 << 20
# Tokens unpacked at a time, of one sequence and over the whole batch. With fewer, the loop's own overhead
# shows; with more, unpacked latents (1 KiB each at 256 dims) fall out of a CPU's cache between the two
# products that read them.
MAX_BLOCK_TOKENS = 1024
MAX_BATCH_TOKENS = 4096


def pages_per_block(batch: int, rows: int, num_pages: int, page_size: int) -> int:
    """Pages of each of `batch` sequences read in one step, when `rows` (queries x heads) score each token."""
    tokens = min(MAX_BLOCK_TOKENS, MAX_BATCH_TOKENS // batch, SCORES_PER_BLOCK // (batch * rows))
    return max(1, min(num_pages, tokens // page_size))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def mla_decode(
    q: Float[Array, "b q h c+r"],
    q_pos: Array,
    pool: Mapping[str, Array],
    block_table: Array,
    page_pos: Array,
    mask: Array | None,
    format: Format,
    scale: float,
) -> tuple[Float[Array, "b q h c"], Float[Array, "b q h"]]:
    b, nq, h, _ = q.shape
    page_size = pool["rope"].shape[-1]
    c = format.latent_dims(pool)
    block = pages_per_block(b, nq * h, block_table.shape[1], page_size)
    padding = -block_table.shape[1] % block
    if padding:
        widths = ((0, 0), (0, padding))
        block_table = jnp.pad(block_table, widths, constant_values=-1)
        page_pos = jnp.pad(page_pos, widths, constant_values=-1)
        mask = None if mask is None else jnp.pad(mask, (*widths, (0, 0)))

    q = (q.astype(jnp.float32) * scale).reshape(b, nq * h, -1)
    q_latent, q_rope = q[..., :c], q[..., c:]

    def bias(page_pos: Array, mask: Array | None) -> Float[Array, "b q k"]:
        visible = visible_keys(q_pos, page_pos, mask, page_size=page_size)
        return jnp.where(visible, 0.0, -jnp.inf)

    # For one query it is a row of the table's length, which is read faster than worked out in the loop.
    whole_bias = lax.optimization_barrier(bias(page_pos, mask)) if nq == 1 else None

    def step(i, running: Running) -> Running:
        pages = functools.partial(lax.dynamic_slice_in_dim, start_index=i * block, slice_size=block, axis=1)
        latent, rope = read_pages(pool, pages(block_table), format)
        if whole_bias is not None:
            size = block * page_size
            hide = lax.dynamic_slice_in_dim(whole_bias, i * size, size, axis=2)
        else:
            hide = jnp.repeat(bias(pages(page_pos), None if mask is None else pages(mask)), h, axis=1)
        scores = jnp.einsum("bmc,bkc->bmk", q_latent, latent) + jnp.einsum("bmr,brk->bmk", q_rope, rope)
        return running.add(scores + hide, lambda weights: jnp.einsum("bmk,bkc->bmc", weights, latent))

    trips = (last_live_page(q_pos, page_pos) + block - 1) // block
    out, lse = lax.fori_loop(0, trips, step, Running.begin((b, nq * h), c)).end()
    return out.reshape(b, nq, h, c), lse.reshape(b, nq, h)


def _forward(q, q_pos, pool, block_table, page_pos, mask, format, scale):
    out = mla_decode(q, q_pos, pool, block_table, page_pos, mask, format, scale)
    return out, (q, q_pos, pool, block_table, page_pos, mask)


def _backward(format, scale, residuals, cotangents):
    q, q_pos, pool, block_table, page_pos, mask = residuals
    floating = {k: v for k, v in pool.items() if jnp.issubdtype(v.dtype, jnp.floating)}

    def run(q, floating):
        return reference.mla_decode(
            q, q_pos, {**pool, **floating}, block_table, page_pos, mask, format=format, scale=scale
        )

    dq, dpool = jax.vjp(run, q, floating)[1](cotangents)
    # Packed bits have no gradient: None stands for the zero cotangent of an integer.
    return dq, None, {k: dpool.get(k) for k in pool}, None, None, None


mla_decode.defvjp(_forward, _backward)
