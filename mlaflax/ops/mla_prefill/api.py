"""The public op: arguments are checked here, once, for every implementation."""

from collections.abc import Mapping
from typing import Literal, get_args

from jaxtyping import Array, Bool, Float, Int

from mlaflax.formats import Format
from mlaflax.ops.mla_prefill import reference, xla

Implementation = Literal["reference", "xla"]


def is_cheaper(queries: int, latent: int, nope: int, rope: int, value: int) -> bool:
    """Whether expanding keys and values costs fewer operations than absorbing their weights into `queries` queries.

    Per head and key, `mla_decode` takes 2c + r multiplications a query; here it is n + r + v a query, and
    c (n + v) for the expansion, once.
    """
    return queries * (2 * latent + rope) > queries * (nope + rope + value) + latent * (nope + value)


def mla_prefill(
    q: Float[Array, "b q h n+r"],
    q_pos: Int[Array, "b q"],
    k_up: Float[Array, "h n c"],
    v_up: Float[Array, "h v c"],
    pool: Mapping[str, Array],
    block_table: Int[Array, "b p"],
    page_pos: Int[Array, "b p"],
    mask: Bool[Array, "b p t"] | None = None,
    *,
    format: Format,
    scale: float,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "b q h v"], Float[Array, "b q h"]]:
    """Attention of plain queries over the latents in some pages of the pool.

    The same as `mla_decode` with `q_latent = q_nope k_up` and its output times `v_up`, up to rounding; visible
    keys, pages, positions and padding are as there. What it does instead is expand each latent to a key and a
    value per head, once for all queries: `is_cheaper` tells from how many queries on that pays.

    Args:
      q: queries, nope dims first, then the rotated rope dims. Unscaled.
      q_pos: position of each query; negative for padding, which sees nothing.
      k_up, v_up: from the stored basis to each head's keys (nope dims) and values: the weight of the latent's
        norm is already in them.
      pool, block_table, page_pos, mask, format, scale: as for `mla_decode`.
      implementation: `reference`, `xla`, or None to pick.

    Returns:
      Outputs per head and the log-sum-exp of the scaled scores, float32. A query that sees nothing gets 0
      and -inf.

    Raises:
      ValueError: shapes that do not belong together, or an unknown implementation.
    """
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation = {implementation!r}: must be one of {', '.join(get_args(Implementation))}"
        )
    b, nq, h, width = q.shape
    c, r, t = format.latent_dims(pool), pool["rope"].shape[-2], pool["rope"].shape[-1]
    if set(pool) != format.names(c, r):
        raise ValueError(
            f"pool holds {sorted(pool)}: format {format.name} needs {sorted(format.names(c, r))}"
        )
    for name, array, shape in (
        ("q_pos", q_pos, (b, nq)),
        ("k_up", k_up, (h, width - r, c)),
        ("v_up", v_up, (h, v_up.shape[1], c)),
        ("page_pos", page_pos, block_table.shape),
        ("block_table", block_table, (b, block_table.shape[1])),
        ("mask", mask, (b, block_table.shape[1], t)),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}: must be {shape}")
    run = reference.mla_prefill if implementation == "reference" else xla.mla_prefill
    return run(q, q_pos, k_up, v_up, dict(pool), block_table, page_pos, mask, format, scale)
