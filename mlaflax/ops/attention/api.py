"""The public op: arguments are checked here, once, for every implementation."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mlaflax.ops.attention import reference, xla

Implementation = Literal["reference", "xla"]


def attention(
    q: Float[Array, "b q h n"],
    k: Float[Array, "b q h n"],
    v: Float[Array, "b q h v"],
    segment_ids: Int[Array, "b q"],
    *,
    scale: float,
    implementation: Implementation | None = None,
) -> Float[Array, "b q h v"]:
    """Causal softmax attention within segments; softmax in float32.

    A query sees the keys up to its own index that carry its segment id. Segment 0 is padding: it sees
    nothing, and its output is 0.

    Args:
      q, k: queries and keys, one key head per query head.
      v: values, whose width may differ.
      segment_ids: of queries and keys alike.
      scale: the softmax scale, applied once, here.
      implementation: `reference`, `xla`, or None to pick.

    Returns:
      Outputs in `v`'s dtype.

    Raises:
      ValueError: shapes that do not belong together, or an unknown implementation.
    """
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation = {implementation!r}: must be one of {', '.join(get_args(Implementation))}"
        )
    if q.shape != k.shape or v.shape[:3] != q.shape[:3] or segment_ids.shape != q.shape[:2]:
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape} and segment_ids {segment_ids.shape} do not belong together"
        )
    if q.size == 0 or v.size == 0:
        return jnp.zeros(v.shape, v.dtype)
    run = reference.attention if implementation == "reference" else xla.attention
    return run(q, k, v, segment_ids, scale=scale)
