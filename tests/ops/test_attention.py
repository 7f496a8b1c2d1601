"""Blockwise attention against the whole softmax, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlaflax.ops.attention import attention, xla
from mlaflax.ops.attention.api import attention as api


def inputs(b=2, length=75, h=3, n=10, v=6, seed=0):
    rng = np.random.default_rng(seed)
    q, k = (jnp.asarray(rng.standard_normal((b, length, h, n)) * 2, jnp.float32) for _ in range(2))
    values = jnp.asarray(rng.standard_normal((b, length, h, v)), jnp.float32)
    return q, k, values


SEGMENTS = {
    "one": np.ones((2, 75)),
    "packed": np.stack([np.repeat([1, 2, 3], [20, 50, 5]), np.repeat([1, 2, 0], [1, 60, 14])]),
    "left padded": np.stack([np.repeat([0, 1], [40, 35]), np.repeat([0, 1], [3, 72])]),
}


def softmax_by_hand(q, k, v, segments, scale):
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, i, h in np.ndindex(*q.shape[:3]):
        keys = [j for j in range(i + 1) if segments[b, j] == segments[b, i] and segments[b, i] > 0]
        if keys:
            scores = np.asarray(k, np.float64)[b, keys, h] @ np.asarray(q, np.float64)[b, i, h] * scale
            weights = np.exp(scores - scores.max())
            out[b, i, h] = weights @ np.asarray(v, np.float64)[b, keys, h] / weights.sum()
    return out


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_forward_is_a_softmax_over_earlier_keys_of_the_segment(segments, implementation, monkeypatch):
    monkeypatch.setattr(xla, "SMALL", 16)
    q, k, v = inputs()
    ids = jnp.asarray(SEGMENTS[segments], jnp.int32)
    got = api(q, k, v, ids, scale=0.4, implementation=implementation)
    np.testing.assert_allclose(got, softmax_by_hand(q, k, v, SEGMENTS[segments], 0.4), atol=1e-5)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("block", [8, 32, 75, 256, None])
def test_blockwise_gradients_equal_those_of_the_whole_softmax(segments, block, monkeypatch):
    monkeypatch.setattr(xla, "SMALL", 8)
    q, k, v = inputs(seed=1)
    ids = jnp.asarray(SEGMENTS[segments], jnp.int32)
    weight = jnp.asarray(np.random.default_rng(2).standard_normal(v.shape), jnp.float32)
    loss = lambda run: lambda q, k, v: jnp.sum(run(q, k, v) * weight)  # noqa: E731
    want = jax.grad(loss(lambda *x: api(*x, ids, scale=0.4, implementation="reference")), (0, 1, 2))(q, k, v)
    got = jax.grad(loss(lambda *x: xla.attention(*x, ids, scale=0.4, block=block)), (0, 1, 2))(q, k, v)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)


def test_the_length_chooses_the_form():
    assert [xla._choose(n) for n in (10, 64, 512)] == [(xla._unrolled, n) for n in (10, 64, 64)]
    assert xla._choose(513) == (xla._looped, xla.BLOCK)


def test_no_array_of_length_times_length_exists():
    length = 1536
    shapes = [jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)] * 3
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    step = jax.jit(jax.grad(lambda q, k, v, ids: jnp.sum(attention(q, k, v, ids, scale=1.0)), (0, 1, 2)))
    temporary = step.lower(*shapes, ids).compile().memory_analysis().temp_size_in_bytes
    assert temporary < length * length * 4


def test_mismatched_shapes_are_named():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="do not belong together"):
        attention(q, k[:, :-1], v, jnp.ones((2, 75), int), scale=1.0)


def test_nothing_in_gives_nothing_out():
    q, k, v = inputs(length=0)
    assert attention(q, k, v, jnp.ones((2, 0), int), scale=1.0).shape == (2, 0, 3, 6)
