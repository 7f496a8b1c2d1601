"""Grouped matrix products: rows sorted by expert times a stack of expert matrices.

Implementations:
  reference: every expert times every row, masked. The specification; E times the work.
  xla: a loop over experts and blocks of their rows, forward and backward. The fast form on CPU.
  ragged_dot: `jax.lax.ragged_dot`. The fast form on TPU and GPU; on CPU it costs E times dense.

None picks `xla` on CPU and `ragged_dot` elsewhere. It picks when the program is lowered, so an export for
several platforms, or a compilation for a platform other than the one that traces, gets the right one.
"""

from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from mlaflax.ops.grouped_matmul import ragged_dot, reference, xla

Implementation = Literal["reference", "xla", "ragged_dot"]
FORMS = {"xla": xla, "ragged_dot": ragged_dot}


def grouped_matmul(
    x: Float[Array, "m k"],
    w: Float[Array, "e k n"],
    group_sizes: Int[Array, " e"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "m n"]:
    """Multiply each row with the matrix of its group: rows `[start[i], start[i] + group_sizes[i])` with `w[i]`.

    Products accumulate in float32; operands are rounded to the dtype of `x`, gradients have the dtype of
    what they are the gradient of. Rows beyond the last group give 0 and get gradient 0. Differentiable in
    `x` and `w`, in reverse mode; not meant for `vmap`.

    Args:
      x: rows sorted by group, float32 or bfloat16.
      w: one matrix per group, float32 or bfloat16.
      group_sizes: int32 rows in each group, 0 allowed, with a sum of at most `m`. The sum depends on data
        and is not checked.
      implementation: None for the fastest on the platform, or a name from the module's docstring.

    Returns:
      The products, in the dtype of `x`.

    Raises:
      ValueError: shapes or dtypes do not fit, or the implementation is unknown.
    """
    _check(x, group_sizes, implementation, w=w)
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"x {x.shape} and w {w.shape}: x's columns must be w's axis 1")
    if len(x) == 0:
        return jnp.zeros((0, w.shape[2]), x.dtype)
    if implementation == "reference":
        return reference.grouped_matmul(x, w, group_sizes)
    return _matmul(implementation, x, w, group_sizes)


def grouped_swiglu(
    x: Float[Array, "m d"],
    gate: Float[Array, "e d f"],
    up: Float[Array, "e d f"],
    down: Float[Array, "e f d"],
    group_sizes: Int[Array, " e"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "m d"]:
    """`(silu(x gate) * (x up)) down` with each row's own expert; `grouped_matmul` has the conventions.

    One op because a fused walk touches each expert's weights and each row once. The gradient keeps the two
    products `[m, f]`, nothing larger.

    Raises:
      ValueError: shapes or dtypes do not fit, or the implementation is unknown.
    """
    _check(x, group_sizes, implementation, gate=gate, up=up, down=down)
    e, d, f = gate.shape
    if x.shape[1] != d or up.shape != gate.shape or down.shape != (e, f, d):
        raise ValueError(
            f"x {x.shape}, gate {gate.shape}, up {up.shape}, down {down.shape}: "
            "must be [m, d], [e, d, f], [e, d, f], [e, f, d]"
        )
    if len(x) == 0:
        return jnp.zeros(x.shape, x.dtype)
    if implementation == "reference":
        return reference.grouped_swiglu(x, gate, up, down, group_sizes)
    return _swiglu(implementation, x, gate, up, down, group_sizes)


def _check(x, group_sizes, implementation, **stacks) -> None:
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation = {implementation!r}: must be None or one of {get_args(Implementation)}"
        )
    if x.ndim != 2:
        raise ValueError(f"x {x.shape}: must have 2 axes, [rows, columns]")
    if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes {group_sizes.shape} {group_sizes.dtype}: must be a vector of integers")
    if len(group_sizes) == 0:
        raise ValueError("group_sizes is empty: there must be at least one group")
    for name, array in {"x": x, **stacks}.items():
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"{name} is {array.dtype}: must be float32 or bfloat16")
    for name, stack in stacks.items():
        if stack.ndim != 3 or len(stack) != len(group_sizes):
            raise ValueError(
                f"{name} {stack.shape}: must be a stack of {len(group_sizes)} matrices, one per group"
            )


def _dispatch(implementation, function: str, *args):
    if implementation is not None:
        return getattr(FORMS[implementation], function)(*args)
    return lax.platform_dependent(*args, cpu=getattr(xla, function), default=getattr(ragged_dot, function))


# The custom gradients are outside the choice of platform: differentiating through the choice would keep
# the residuals of every branch.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(implementation, x, w, group_sizes):
    return _dispatch(implementation, "matmul", x, w, group_sizes)


def _matmul_forward(implementation, x, w, group_sizes):
    return _matmul(implementation, x, w, group_sizes), (x, w, group_sizes)


def _matmul_backward(implementation, residuals, dy):
    dx, dw = _dispatch(implementation, "matmul_gradients", *residuals, dy)
    return dx, dw, _no_gradient(residuals[2])


_matmul.defvjp(_matmul_forward, _matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _swiglu(implementation, x, gate, up, down, group_sizes):
    return _dispatch(implementation, "swiglu", x, gate, up, down, group_sizes)


def _swiglu_forward(implementation, x, gate, up, down, group_sizes):
    args = x, gate, up, down, group_sizes
    y, a, b = _dispatch(implementation, "swiglu_with_products", *args)
    return y, (*args, a, b)


def _swiglu_backward(implementation, residuals, dy):
    gradients = _dispatch(implementation, "swiglu_gradients", *residuals, dy)
    return *gradients, _no_gradient(residuals[4])


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def _no_gradient(x):
    return np.zeros(x.shape, jax.dtypes.float0)
