"""The public op: arguments are checked here, once, for every implementation."""

from collections.abc import Mapping
from typing import Literal, get_args

from jaxtyping import Array, Bool, Float, Int

from mlaflax.formats import Format
from mlaflax.ops.gqa_decode import reference, xla

Implementation = Literal["reference", "xla"]


def gqa_decode(
    q: Float[Array, "b q h n"],
    q_pos: Int[Array, "b q"],
    pool: Mapping[str, Array],
    block_table: Int[Array, "b g p"],
    page_pos: Int[Array, "b p"],
    mask: Bool[Array, "b p t"] | None = None,
    *,
    format: Format,
    scale: float,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "b q h v"], Float[Array, "b q h"]]:
    """Attention over the keys and values in some pages of the pool, each page of one KV head.

    `softmax(scale * (q . key))` over the visible keys, applied to the values; query heads `i * h/g` to
    `(i + 1) * h/g - 1` read KV head `i`. Which keys are visible is the rule of `mla_decode`. Not differentiable as
    `xla`: training has no cache.

    Args:
      q: rotated queries. Unscaled.
      q_pos: position of each query; negative for padding, which sees nothing.
      pool: the format's parts over all layers and KV heads: values where `mla_decode` has latents, `latent
        [pages, t, v]`, keys where it has rope keys, `rope [pages, n, t]`.
      block_table: pages of each KV head to read, already offset to layer and head; -1 for an unused entry.
      page_pos: position of each page's first token, the same for all heads; -1 for an unused entry.
      mask: optional bit per token, False to hide it.
      format: how the pool's bits read.
      scale: the softmax scale, applied once, here.
      implementation: `reference`, `xla`, or None to pick.

    Returns:
      Outputs and the log-sum-exp of the scaled scores, float32. A query that sees nothing gets 0 and -inf. Calls
      over disjoint keys are joined by `merge_lse` of `mla_decode`.

    Raises:
      ValueError: shapes that do not belong together, or an unknown implementation.
    """
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation = {implementation!r}: must be one of {', '.join(get_args(Implementation))}"
        )
    b, nq, h, width = q.shape
    v, n, t = format.latent_dims(pool), pool["rope"].shape[-2], pool["rope"].shape[-1]
    if width != n:
        raise ValueError(f"q has width {width}: must be the keys' {n}")
    if set(pool) != format.names(v, n):
        raise ValueError(
            f"pool holds {sorted(pool)}: format {format.name} needs {sorted(format.names(v, n))}"
        )
    g, p = block_table.shape[1], page_pos.shape[1]
    if h % g:
        raise ValueError(f"q has {h} heads: must be a multiple of the {g} KV heads of block_table")
    for name, array, shape in (
        ("q_pos", q_pos, (b, nq)),
        ("block_table", block_table, (b, g, p)),
        ("page_pos", page_pos, (b, block_table.shape[2])),
        ("mask", mask, (b, p, t)),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}: must be {shape}")
    if implementation == "reference":
        return reference.gqa_decode(q, q_pos, pool, block_table, page_pos, mask, format=format, scale=scale)
    return xla.gqa_decode(q, q_pos, pool, block_table, page_pos, mask, format=format, scale=scale)
