"""`jax.lax.ragged_dot`: the grouped product that XLA compiles to kernels on TPU and GPU."""

import jax
import jax.numpy as jnp
from jax import lax

# For each group, the rows of one operand transposed times those of the other: [m, k], [m, n] -> [e, k, n].
OUTER = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
)


def _mask(x, group_sizes):
    """Rows no group covers as 0: backends differ in what they leave there."""
    return jnp.where((jnp.arange(len(x)) < group_sizes.sum())[:, None], x, 0)


def matmul(x, w, group_sizes):
    y = lax.ragged_dot(x, w.astype(x.dtype), group_sizes, preferred_element_type=jnp.float32)
    return _mask(y, group_sizes).astype(x.dtype)


def matmul_gradients(x, w, group_sizes, dy):
    dy = _mask(dy, group_sizes)
    dx = matmul(dy, w.swapaxes(1, 2), group_sizes)
    # Autodiff's rule for the weights is the same product, rounded to the dtype of the rows.
    dw = lax.ragged_dot_general(x, dy, group_sizes, OUTER, preferred_element_type=jnp.float32)
    return dx, dw.astype(w.dtype)


def swiglu(x, gate, up, down, group_sizes):
    return swiglu_with_products(x, gate, up, down, group_sizes)[0]


def swiglu_with_products(x, gate, up, down, group_sizes):
    a, b = matmul(x, gate, group_sizes), matmul(x, up, group_sizes)
    return matmul(_hidden(a, b), down, group_sizes), a, b


def swiglu_gradients(x, gate, up, down, group_sizes, a, b, dy):
    hidden, hidden_vjp = jax.vjp(_hidden, a, b)
    dh, ddown = matmul_gradients(hidden, down, group_sizes, dy)
    da, db = hidden_vjp(dh)
    dx_gate, dgate = matmul_gradients(x, gate, group_sizes, da)
    dx_up, dup = matmul_gradients(x, up, group_sizes, db)
    return dx_gate + dx_up, dgate, dup, ddown


def _hidden(a, b):
    return jax.nn.silu(a) * b
