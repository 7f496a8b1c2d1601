"""Schedules and AdamW against their closed forms."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from train.config import OptimizerConfig
from train.optimizer import clip_scale, decayed, learning_rate, make_optimizer

STEPS = 100


def rates(**fields) -> np.ndarray:
    schedule = learning_rate(OptimizerConfig(learning_rate=2.0, final_ratio=0.1, **fields), STEPS)
    return np.array([float(schedule(step)) for step in range(STEPS)])


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_warmup_is_linear_and_reaches_the_peak(schedule):
    values = rates(schedule=schedule, warmup_steps=10)
    np.testing.assert_allclose(values[:10], 2.0 * np.arange(1, 11) / 10, rtol=1e-6)
    assert values.max() == pytest.approx(2.0)


def test_cosine_follows_the_cosine():
    values = rates(schedule="cosine", warmup_steps=10)
    t = np.arange(90) / 90
    np.testing.assert_allclose(values[10:], 2.0 * (0.1 + 0.9 * (1 + np.cos(math.pi * t)) / 2), rtol=1e-5)


def test_wsd_holds_then_falls_linearly():
    values = rates(schedule="wsd", warmup_steps=10, decay_fraction=0.3)
    np.testing.assert_allclose(values[10:71], 2.0, rtol=1e-6)
    np.testing.assert_allclose(np.diff(values[70:]), -2.0 * 0.9 / 30, rtol=1e-3)


def test_no_warmup():
    assert rates(warmup_steps=0)[0] == pytest.approx(2.0)


def test_first_update_is_adamw():
    # With bias correction the first update is g / (|g| + eps); matrices decay, norm weights do not.
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5)
    optimizer = make_optimizer(config, STEPS)
    params = {"norm": {"scale": jnp.array([2.0, 2.0])}, "w": jnp.array([[4.0, -4.0]])}
    grads = {"norm": {"scale": jnp.array([0.3, -0.3])}, "w": jnp.array([[1e-3, 10.0]])}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(updates["norm"]["scale"], [-0.1, 0.1], rtol=1e-4)
    np.testing.assert_allclose(updates["w"], [[-0.1 * (1 + 0.5 * 4), -0.1 * (1 - 0.5 * 4)]], rtol=1e-4)


def test_decay_spares_only_norms():
    tree = {"layers": {"attn_norm": {"scale": 0}, "attn": {"q": 0, "kv_norm": {"scale": 0}}}, "embed": 0}
    assert decayed(tree) == {
        "layers": {"attn_norm": {"scale": False}, "attn": {"q": True, "kv_norm": {"scale": False}}},
        "embed": True,
    }


def test_clipping():
    assert float(clip_scale(jnp.array(4.0), 1.0)) == pytest.approx(0.25)
    assert float(clip_scale(jnp.array(0.5), 1.0)) == 1.0
    assert clip_scale(jnp.array(4.0), 0.0) == 1.0
