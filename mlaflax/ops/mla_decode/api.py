"""The public op: arguments are checked here, once, for every implementation."""

from collections.abc import Mapping
from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mlaflax.formats import Format
from mlaflax.ops.mla_decode import reference, xla

Implementation = Literal["reference", "xla"]


def mla_decode(
    q: Float[Array, "b q h c+r"],
    q_pos: Int[Array, "b q"],
    pool: Mapping[str, Array],
    block_table: Int[Array, "b p"],
    page_pos: Int[Array, "b p"],
    mask: Bool[Array, "b p t"] | None = None,
    *,
    format: Format,
    scale: float,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "b q h c"], Float[Array, "b q h"]]:
    """Attention of absorbed queries over the latents in some pages of the pool.

    `softmax(scale * (q_latent . latent + q_rope . rope))` over the visible keys, applied to the latents.
    A key is visible when `0 <= key position <= q_pos`, its page is used, and its mask bit, if there is a
    mask, is set. Append before attending: a query sees its own token in the pool.

    Args:
      q: absorbed queries, latent dims first, then the rotated rope dims. Unscaled.
      q_pos: position of each query; negative for padding, which sees nothing.
      pool: the format's parts over all layers, `latent [pages, t, c]`, `rope [pages, r, t]`, ..., and
        the layer's `codebook [16]` where the format needs one (`LatentCache.layer_pool`).
      block_table: pages to read, already offset to the layer; -1 for an unused entry. Any subset of a
        sequence's pages, in any order.
      page_pos: position of each page's first token; -1 for an unused entry.
      mask: optional bit per token, False to hide it.
      format: how the pool's bits read.
      scale: the softmax scale, applied once, here.
      implementation: `reference`, `xla`, or None to pick.

    Returns:
      Outputs in latent space (stored basis) and the log-sum-exp of the scaled scores, float32. A query
      that sees nothing gets 0 and -inf. Calls over disjoint keys are joined by `merge_lse`.

    Raises:
      ValueError: shapes that do not belong together, or an unknown implementation.
    """
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation = {implementation!r}: must be one of {', '.join(get_args(Implementation))}"
        )
    b, nq, _, width = q.shape
    c, r, t = format.latent_dims(pool), pool["rope"].shape[-2], pool["rope"].shape[-1]
    if width != c + r:
        raise ValueError(f"q has width {width}: must be the latent's {c} plus the rope's {r}")
    if set(pool) != format.names(c, r):
        raise ValueError(
            f"pool holds {sorted(pool)}: format {format.name} needs {sorted(format.names(c, r))}"
        )
    for name, array, shape in (
        ("q_pos", q_pos, (b, nq)),
        ("block_table", block_table, (b, page_pos.shape[1])),
        ("page_pos", page_pos, (b, block_table.shape[1])),
        ("mask", mask, (b, block_table.shape[1], t)),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}: must be {shape}")
    if implementation == "reference":
        return reference.mla_decode(q, q_pos, pool, block_table, page_pos, mask, format=format, scale=scale)
    return xla.mla_decode(q, q_pos, dict(pool), block_table, page_pos, mask, format, scale)


def merge_lse(
    *results: tuple[Float[Array, "b q h c"], Float[Array, "b q h"]],
) -> tuple[Float[Array, "b q h c"], Float[Array, "b q h"]]:
    """Join attention over disjoint sets of keys: outputs weighted by their shares exp(lse_i - lse).

    Exact, associative and commutative up to rounding. A part that saw nothing (lse -inf) drops out.
    """
    outs, lses = zip(*results, strict=True)
    stacked = jnp.stack(lses)
    peak = jnp.max(stacked, axis=0)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp(stacked - peak)
    total = jnp.sum(weights, axis=0)
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    out = jnp.sum(jnp.stack(outs) * (weights / safe)[..., None], axis=0)
    return out, jnp.where(seen, peak + jnp.log(safe), -jnp.inf)
