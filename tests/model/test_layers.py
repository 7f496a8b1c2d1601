"""RMSNorm and SwiGLU against their formulas in numpy."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mlaflax.model.layers import RMSNorm, SwiGLU, rms_normalize


def inputs(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_rms_norm_is_its_formula():
    x = 3 * inputs(4, 6, 32)
    norm = RMSNorm(32, 1e-5)
    norm.scale[...] = jnp.asarray(inputs(32))
    plain = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(rms_normalize(jnp.asarray(x), 1e-5), plain, rtol=2e-6)
    np.testing.assert_allclose(norm(jnp.asarray(x)), plain * inputs(32), rtol=2e-6, atol=1e-7)


def test_rms_norm_epsilon_counts():
    """A row of 1e-3 has mean square 1e-6: with an epsilon of 3e-6 it comes out at a half."""
    np.testing.assert_allclose(rms_normalize(jnp.full((1, 8), 1e-3), 3e-6), 0.5, rtol=1e-6)


def test_rms_norm_of_bfloat16_is_rounded_once():
    x = jnp.asarray(100 * inputs(8, 256), jnp.bfloat16)
    norm = RMSNorm(256, 1e-6)
    norm.scale[...] = jnp.asarray(inputs(256))
    got = norm(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, norm(x.astype(jnp.float32)).astype(jnp.bfloat16))
    assert rms_normalize(x, 1e-6).dtype == jnp.bfloat16


def test_swiglu_is_its_formula():
    mlp = SwiGLU(16, 24, dtype=jnp.float32, init_std=0.1, rngs=nnx.Rngs(0))
    x = inputs(3, 5, 16)
    gate, up, down = (np.asarray(w[...], np.float64) for w in (mlp.gate, mlp.up, mlp.down))
    a = x @ gate
    np.testing.assert_allclose(
        mlp(jnp.asarray(x)), (a / (1 + np.exp(-a)) * (x @ up)) @ down, rtol=0, atol=2e-6
    )


def test_swiglu_computes_in_its_dtype_from_float32_weights():
    mlp = SwiGLU(16, 24, dtype=jnp.bfloat16, init_std=0.02, rngs=nnx.Rngs(0))
    assert mlp(jnp.ones((2, 16))).dtype == jnp.bfloat16
    weights = [w[...] for w in (mlp.gate, mlp.up, mlp.down)]
    assert [w.shape for w in weights] == [(16, 24), (16, 24), (24, 16)]
    assert all(w.dtype == jnp.float32 for w in weights)
    assert 0.015 < float(jnp.std(weights[0])) < 0.025
    # Different draws: one key for all would tie the gate to the up projection.
    assert float(jnp.abs(weights[0] - weights[1]).min()) > 0
