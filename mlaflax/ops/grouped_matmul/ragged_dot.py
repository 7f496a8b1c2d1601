"""`jax.lax.ragged_dot`: the grouped product that XLA compiles to kernels on TPU and GPU."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def _mask(x, group_sizes):
    """Rows no group covers as 0: backends differ in what they leave there."""
    return jnp.where((jnp.arange(len(x)) < group_sizes.sum())[:, None], x, 0)


def matmul(x, w, group_sizes):
    y = lax.ragged_dot(x, w.astype(x.dtype), group_sizes, preferred_element_type=jnp.float32)
    return _mask(y, group_sizes).astype(x.dtype)


def matmul_gradients(x, w, group_sizes, dy):
    # The product is linear in each operand: its own transpose rules give both gradients, and the
    # recomputed value is dead code.
    product = partial(lax.ragged_dot, group_sizes=group_sizes, preferred_element_type=jnp.float32)
    dx, dw = jax.vjp(product, x, w.astype(x.dtype))[1](_mask(dy, group_sizes).astype(jnp.float32))
    return _mask(dx, group_sizes), dw.astype(w.dtype)


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
