"""A form that is sparse on any backend, made for CPU: a loop over experts, inside it one over blocks of rows.

XLA:CPU lowers `ragged_dot` to E dense products, and a batched product over padded groups runs at half the
speed of plain ones. So: for each expert that has rows, copy its weights out of the stack once, then multiply
block by block. The loops have dynamic trip counts; nothing is done for empty experts or past the last row.

Gradients are a second walk of the same kind, written by hand: autodiff would keep every block's copy of the
weights. An expert's gradient is summed in float32 over its blocks, then stored in the stack in place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Larger blocks cost more in padding than they save in calls (measured, 2 cores).
MAX_BLOCK = 256


def block_sizes(rows: int, experts: int) -> tuple[int, int]:
    """Rows in a whole block and in the smaller blocks that finish a group, from the rows of a mean group.

    Groups of a few rows (decoding) go row by row: a matrix-vector product reads the weights fastest.
    """
    mean = rows // experts
    if mean < 4:
        return 1, 1
    if mean < 16:
        return 4, 4
    block = min(1 << (mean.bit_length() - 1), MAX_BLOCK)
    return block, min(block // 4, 32)


def _walk(
    group_sizes: Int[Array, " e"],
    rows: tuple[Float[Array, "m _"], ...],
    stacks: tuple[Float[Array, "e _ _"], ...],
    block: Callable[[tuple, tuple], tuple[tuple, tuple]],
    row_outputs: tuple[Any, ...],
    stack_outputs: tuple[Any, ...] = (),
) -> tuple[tuple, tuple]:
    """Apply `block` to every block of rows and the weights of its expert.

    Args:
      rows: arrays cut into blocks of rows.
      stacks: arrays of which each block sees its expert's slice.
      block: (rows of a block, weights of its expert) to (output rows, terms of the weights' gradient), all
        float32; weights are rounded to the dtype of the rows first. Rows past the end of the group read as
        0; `block` must map them to output rows of 0 and terms of 0.
      row_outputs, stack_outputs: arrays with the shape and dtype of what `block`'s results are collected in.

    Returns:
      The collected rows, 0 where no group covers them, and the collected stacks, 0 for empty experts.
    """
    m = len(rows[0])
    whole, small = block_sizes(m, len(group_sizes))
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    # Experts that have rows, first.
    active = jnp.argsort(group_sizes == 0, stable=True)
    # A block may reach past the end of its group. Groups are visited in the order of their rows, so what
    # it writes there is 0 where no group follows, and overwritten by the next group where one does.
    padded = tuple(jnp.pad(r, ((0, whole - 1), (0, 0))) for r in rows)
    outputs = tuple(jnp.zeros((m + whole - 1, *o.shape[1:]), o.dtype) for o in row_outputs)
    sums = tuple(jnp.zeros(o.shape, o.dtype) for o in stack_outputs)

    def visit(i, carry):
        outputs, sums = carry
        expert = active[i]
        end = ends[expert]
        weights = tuple(_slice(s, expert, 1)[0].astype(rows[0].dtype).astype(jnp.float32) for s in stacks)
        terms = tuple(jnp.zeros(o.shape[1:], jnp.float32) for o in stack_outputs)

        def step(size, carry):
            start, outputs, terms = carry
            mine = (start + jnp.arange(size) < end)[:, None]
            chunk = tuple(jnp.where(mine, _slice(r, start, size).astype(jnp.float32), 0) for r in padded)
            new_rows, new_terms = block(chunk, weights)
            outputs = tuple(
                _store(o, r.astype(o.dtype), start) for o, r in zip(outputs, new_rows, strict=True)
            )
            terms = tuple(t + n for t, n in zip(terms, new_terms, strict=True))
            return start + size, outputs, terms

        carry = starts[expert], outputs, terms
        # A whole block pays when it is filled but for less than one small block.
        carry = lax.while_loop(lambda c: c[0] + whole - small < end, partial(step, whole), carry)
        if small < whole:
            carry = lax.while_loop(lambda c: c[0] < end, partial(step, small), carry)
        _, outputs, terms = carry
        sums = tuple(_store(s, t.astype(s.dtype)[None], expert) for s, t in zip(sums, terms, strict=True))
        return outputs, sums

    outputs, sums = lax.fori_loop(0, (group_sizes > 0).sum(), visit, (outputs, sums))
    return tuple(o[:m] for o in outputs), sums


def _slice(x, start, size):
    return lax.dynamic_slice_in_dim(x, start, size, axis=0)


def _store(x, update, start):
    return lax.dynamic_update_slice_in_dim(x, update, start, axis=0)


def _like(rows: Array, width: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((len(rows), width), rows.dtype)


def matmul(x, w, group_sizes):
    def block(rows, weights):
        return (rows[0] @ weights[0],), ()

    (y,), _ = _walk(group_sizes, (x,), (w,), block, (_like(x, w.shape[2]),))
    return y


def matmul_gradients(x, w, group_sizes, dy):
    def block(rows, weights):
        (x, dy), (w,) = rows, weights
        return (dy @ w.T,), (x.T @ dy,)

    (dx,), (dw,) = _walk(group_sizes, (x, dy), (w,), block, (x,), (w,))
    return dx, dw


def swiglu(x, gate, up, down, group_sizes):
    def block(rows, weights):
        (x,), (gate, up, down) = rows, weights
        return ((jax.nn.silu(x @ gate) * (x @ up)) @ down,), ()

    (y,), _ = _walk(group_sizes, (x,), (gate, up, down), block, (x,))
    return y


def swiglu_with_products(x, gate, up, down, group_sizes):
    """`swiglu`, and the products `x gate` and `x up` `[m, f]` that its gradient needs."""

    def block(rows, weights):
        (x,), (gate, up, down) = rows, weights
        a, b = x @ gate, x @ up
        return ((jax.nn.silu(a) * b) @ down, a, b), ()

    products = _like(x, gate.shape[2])
    (y, a, b), _ = _walk(group_sizes, (x,), (gate, up, down), block, (x, products, products))
    return y, a, b


def swiglu_gradients(x, gate, up, down, group_sizes, a, b, dy):
    def block(rows, weights):
        (x, a, b, dy), (gate, up, down) = rows, weights
        dh = dy @ down.T
        s = jax.nn.sigmoid(a)
        silu = a * s
        da = dh * b * (s + silu * (1 - s))
        db = dh * silu
        return (da @ gate.T + db @ up.T,), (x.T @ da, x.T @ db, (silu * b).T @ dy)

    (dx,), (dgate, dup, ddown) = _walk(
        group_sizes, (x, a, b, dy), (gate, up, down), block, (x,), (gate, up, down)
    )
    return dx, dgate, dup, ddown
