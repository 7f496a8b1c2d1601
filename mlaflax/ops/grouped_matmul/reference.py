"""The obvious form: every expert multiplies every row, a mask keeps its own. E times the work."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def row_experts(group_sizes: Int[Array, " e"], rows: int) -> Int[Array, " m"]:
    """The expert of each row; `e` for rows beyond the last group."""
    return jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(rows), side="right")


def grouped_matmul(
    x: Float[Array, "m k"], w: Float[Array, "e k n"], group_sizes: Int[Array, " e"]
) -> Float[Array, "m n"]:
    mine = row_experts(group_sizes, len(x)) == jnp.arange(len(w))[:, None]
    every = jnp.einsum("mk,ekn->emn", x, w.astype(x.dtype), preferred_element_type=jnp.float32)
    return jnp.where(mine[:, :, None], every, 0).sum(0).astype(x.dtype)


def grouped_swiglu(
    x: Float[Array, "m d"],
    gate: Float[Array, "e d f"],
    up: Float[Array, "e d f"],
    down: Float[Array, "e f d"],
    group_sizes: Int[Array, " e"],
) -> Float[Array, "m d"]:
    mine = row_experts(group_sizes, len(x)) == jnp.arange(len(gate))[:, None]
    a = jnp.einsum("md,edf->emf", x, gate.astype(x.dtype), preferred_element_type=jnp.float32)
    b = jnp.einsum("md,edf->emf", x, up.astype(x.dtype), preferred_element_type=jnp.float32)
    hidden = (a / (1 + jnp.exp(-a)) * b).astype(x.dtype)
    every = jnp.einsum("emf,efd->emd", hidden, down.astype(x.dtype), preferred_element_type=jnp.float32)
    return jnp.where(mine[:, :, None], every, 0).sum(0).astype(x.dtype)
