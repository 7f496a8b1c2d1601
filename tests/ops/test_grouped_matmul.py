"""Grouped matrix products, every implementation against a plain numpy loop over rows."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlaflax.ops.grouped_matmul import Implementation, grouped_matmul, grouped_swiglu, xla

D, F = 24, 16

# Rows, then what a router may do with them. All patterns of one entry share a compilation; the three
# entries take different block sizes.
GROUPS = {
    "few rows": (9, [[0, 1, 0, 3, 0, 0, 1, 2], [0] * 8, [9, 0, 0, 0, 0, 0, 0, 0], [0] * 7 + [5]]),
    "small": (77, [[31, 1, 0, 45], [19, 19, 19, 19], [0, 77, 0, 0], [7, 0, 20, 3], [0, 0, 0, 1]]),
    "whole blocks": (600, [[384, 128, 88], [0, 0, 599], [131, 255, 1]]),
}
CASES = [(name, jnp.float32) for name in GROUPS] + [("small", jnp.bfloat16)]


def draw(rows, e, dtype):
    rng = np.random.default_rng(rows)
    shapes = (rows, D), (e, D, F), (e, D, F), (e, F, D), (rows, D)
    return [jnp.asarray(rng.normal(size=s) / np.sqrt(s[-2] if len(s) == 3 else 1), dtype) for s in shapes]


def numpy_swiglu(x, gate, up, down, dy, sizes):
    """Value and gradients of sum(y * dy), one row at a time in float64."""
    x, gate, up, down, dy = (np.asarray(a, np.float64) for a in (x, gate, up, down, dy))
    y, dx = np.zeros_like(x), np.zeros_like(x)
    dgate, dup, ddown = np.zeros_like(gate), np.zeros_like(up), np.zeros_like(down)
    for row, e in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        a, b = x[row] @ gate[e], x[row] @ up[e]
        s = 1 / (1 + np.exp(-a))
        h = a * s * b
        y[row] = h @ down[e]
        dh = down[e] @ dy[row]
        da, db = dh * b * (s + a * s * (1 - s)), dh * a * s
        dx[row] = gate[e] @ da + up[e] @ db
        dgate[e] += np.outer(x[row], da)
        dup[e] += np.outer(x[row], db)
        ddown[e] += np.outer(h, dy[row])
    return y, dx, dgate, dup, ddown


def numpy_matmul(x, w, dy, sizes):
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros((len(x), w.shape[2])), np.zeros_like(x), np.zeros_like(w)
    for row, e in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        y[row], dx[row] = x[row] @ w[e], w[e] @ dy[row]
        dw[e] += np.outer(x[row], dy[row])
    return y, dx, dw


def check(got, wanted, dtype):
    tolerance = 2e-5 if dtype == jnp.float32 else 3e-2
    for g, w in zip(got, wanted, strict=True):
        assert g.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(g, np.float64), w, rtol=0, atol=tolerance * max(abs(w).max(), 1)
        )


@pytest.mark.parametrize(("groups", "dtype"), CASES, ids=[f"{g}-{jnp.dtype(t).name}" for g, t in CASES])
@pytest.mark.parametrize("implementation", get_args(Implementation))
def test_values_and_gradients(implementation, groups, dtype):
    rows, patterns = GROUPS[groups]

    @jax.jit
    def run(x, gate, up, down, dy, sizes):
        def swiglu(*args):
            return grouped_swiglu(*args, sizes, implementation=implementation)

        def matmul(x, w):
            return grouped_matmul(x, w, sizes, implementation=implementation)

        y, vjp = jax.vjp(swiglu, x, gate, up, down)
        z, matmul_vjp = jax.vjp(matmul, x, gate)
        return (swiglu(x, gate, up, down), y, *vjp(dy)), (z, *matmul_vjp(dy[:, :F]))

    for sizes in patterns:
        x, gate, up, down, dy = draw(rows, len(sizes), dtype)
        (alone, *swiglu), matmul = run(x, gate, up, down, dy, jnp.asarray(sizes, jnp.int32))
        wanted = numpy_swiglu(x, gate, up, down, dy, sizes)
        check((alone, *swiglu), (wanted[0], *wanted), dtype)
        check(matmul, numpy_matmul(x, gate, dy[:, :F], sizes), dtype)


def test_weights_keep_their_dtype_in_gradients():
    """float32 weights with bfloat16 rows, the training setting: gradients must not lose bits to the rows."""
    x, gate, *_ = draw(8, 2, jnp.bfloat16)
    sizes = jnp.array([3, 5])

    def loss(x, w, implementation):
        return grouped_matmul(x, w, sizes, implementation=implementation).astype(jnp.float32).sum()

    for implementation in ("xla", "ragged_dot"):  # the reference leaves gradients to autodiff
        dx, dw = jax.grad(loss, (0, 1))(x, gate.astype(jnp.float32), implementation)
        assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
        wide = np.asarray(x, np.float32)
        np.testing.assert_allclose(dw[1], np.tile(wide[3:].sum(0)[:, None], (1, F)), rtol=1e-5)


def test_scan_over_layers_and_remat():
    """A scan over stacked experts with rematerialisation, as the model runs it, equals a Python loop."""
    x, gate, up, down, _ = draw(20, 4, jnp.float32)
    stacked = jax.tree.map(lambda w: jnp.stack([w, -w, 2 * w]), (gate, up, down))
    sizes = jnp.array([2, 0, 11, 4])

    def layer(x, weights):
        return x + grouped_swiglu(x, *weights, sizes), None

    def scanned(weights):
        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2).sum()

    def looped(weights):
        h = x
        for i in range(3):
            h = h + grouped_swiglu(h, *(w[i] for w in weights), sizes, implementation="reference")
        return (h**2).sum()

    for got, wanted in zip(jax.jit(jax.grad(scanned))(stacked), jax.grad(looped)(stacked), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * abs(wanted).max())


def test_cpu_form_is_sparse():
    """Forward and backward, compiled for CPU, hold a few copies of rows and weights: no [m, e, f], and no
    weights gathered per row or per block."""
    m, e, d, f = 2048, 32, 64, 128
    shapes = [(m, d), (e, d, f), (e, d, f), (e, f, d)]
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    sizes = jax.ShapeDtypeStruct((e,), jnp.int32)

    def memory(implementation):
        def step(*args):
            *args, sizes = args
            return jax.grad(
                lambda *a: grouped_swiglu(*a, sizes, implementation=implementation).sum(), (0, 1, 2, 3)
            )(*args)

        compiled = jax.jit(step).lower(*args, sizes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    rows, products, weights = 4 * m * d, 4 * m * f, 4 * 3 * e * d * f
    limit = 4 * (rows + products) + weights
    assert limit < 4 * m * e * f / 3
    assert memory(None) < limit
    # The same measurement does see a dense form.
    assert memory("reference") > 4 * m * e * f


def test_cpu_work_follows_the_rows():
    """Each row is multiplied once: the blocks visited cover the rows with less than one block to spare per
    expert, and experts without rows are not visited."""
    rows, sizes = 4096, [1000, 0, 3, 129, 0, 2900, 0, 64]
    whole, small = xla.block_sizes(rows, len(sizes))
    seen = []

    def block(chunk, weights):
        jax.debug.callback(lambda n: seen.append(int(n)), chunk[0].shape[0])
        return chunk, ()

    x, w = jnp.ones((rows, 8)), jnp.ones((len(sizes), 8, 8))
    (y,), _ = xla._walk(jnp.array(sizes), (x,), (w,), block, (x,))
    jax.effects_barrier()
    np.testing.assert_array_equal(y, x)
    assert set(seen) == {whole, small}
    assert sum(sizes) <= sum(seen) <= sum(sizes) + small * sum(s > 0 for s in sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cuda"}, "'cuda'.*ragged_dot"),
        ({"x": jnp.zeros((4, 3, 2))}, "2 axes"),
        ({"x": jnp.zeros((4, D + 1))}, "columns"),
        ({"w": jnp.zeros((3, D, F))}, "stack of 2"),
        ({"w": jnp.zeros((2, D, F), jnp.int32)}, "w is int32"),
        ({"group_sizes": jnp.ones(2)}, "vector of integers"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_misuse_is_refused(change, message):
    good = {"x": jnp.zeros((4, D)), "w": jnp.zeros((2, D, F)), "group_sizes": jnp.array([1, 2])}
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**{**good, **change})


def test_swiglu_refuses_shapes_that_do_not_fit():
    x, gate, up, down, _ = draw(4, 2, jnp.float32)
    with pytest.raises(ValueError, match=r"down \(2, 24, 16\)"):
        grouped_swiglu(x, gate, up, down.swapaxes(1, 2), jnp.array([1, 2]))


def test_platform_is_picked_when_lowered():
    """None means the loop on CPU and the ragged product on CUDA, also where there is no such device."""
    x, gate, *_ = draw(8, 2, jnp.float32)
    traced = jax.jit(grouped_matmul).trace(x, gate, jnp.array([3, 5]))
    assert "ragged" in traced.lower(lowering_platforms=("cuda",)).as_text()
    cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "ragged" not in cpu
    assert "while" in cpu


def test_no_rows_give_no_rows_and_no_groups_are_refused():
    w = jnp.ones((4, 3, 2))
    sizes = jnp.zeros(4, jnp.int32)
    assert grouped_matmul(jnp.ones((0, 3)), w, sizes).shape == (0, 2)
    y, pull = jax.vjp(lambda g: grouped_swiglu(jnp.ones((0, 3)), g, w, jnp.ones((4, 2, 3)), sizes), w)
    assert y.shape == (0, 3)
    np.testing.assert_array_equal(pull(y)[0], jnp.zeros_like(w))
    with pytest.raises(ValueError, match="group_sizes is empty: there must be at least one group"):
        grouped_matmul(jnp.ones((2, 3)), jnp.ones((0, 3, 2)), jnp.zeros(0, jnp.int32))
