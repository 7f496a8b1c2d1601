"""The training step: its loss, its gradients, what it updates, and that it compiles once."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlaflax.formats import GAUSSIAN_CODEBOOK
from mlaflax.model.transformer import init_model
from tests.train.tiny import tiny
from train.config import OptimizerConfig
from train.step import Steps

ROWS, LENGTH = 4, 32
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, clip_norm=1e-2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("step")


@pytest.fixture(scope="module")
def steps(directory) -> Steps:
    return Steps(tiny(directory, optimizer=OPTIMIZER))


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    # Rows of different lengths: padding must not weigh in.
    real = np.arange(LENGTH) < np.array([[32], [5], [20], [11]])
    tokens = np.where(real, rng.integers(0, 300, (ROWS, LENGTH)), 0).astype(np.int32)
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "segment_ids": real.astype(np.int32),
        "loss_mask": real.astype(np.int32),
    }


def test_loss_is_the_mean_over_the_mask(steps, batch):
    state = steps.init()
    model = init_model(steps.config.model, steps.config.seed)
    out = model(batch["tokens"], batch["positions"], batch["segment_ids"])
    logits = np.asarray(model.logits(out.hidden), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0]
    expected = (nll * batch["loss_mask"]).sum() / batch["loss_mask"].sum()

    total, count = steps.evaluate(state.params, state.state, steps.place(batch))
    assert int(count) == batch["loss_mask"].sum()
    assert float(total) / int(count) == pytest.approx(expected, rel=1e-5)
    _, metrics = steps.train(state, steps.place(batch))
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)


def test_accumulation_changes_memory_not_results(steps, directory, batch):
    config = tiny(directory)
    other = Steps(dataclasses.replace(config, optimizer=dataclasses.replace(OPTIMIZER, accumulation=2)))
    whole, whole_metrics = steps.train(steps.init(), steps.place(batch))
    split, split_metrics = other.train(other.init(), other.place(batch))
    for name in ("loss", "grad_norm"):
        assert float(split_metrics[name]) == pytest.approx(float(whole_metrics[name]), rel=1e-4)
    # The load of the whole batch moves the bias, not that of the last part.
    jax.tree.map(np.testing.assert_array_equal, whole.state, split.state)
    mean = lambda s: s.opt_state[0].mu  # noqa: E731
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), mean(whole), mean(split)
    )


def test_bias_moves_against_the_load(steps, batch):
    step = steps.config.model.moe.bias_step
    state = steps.init()
    model = init_model(steps.config.model, steps.config.seed)
    load = np.asarray(model(batch["tokens"], batch["positions"], batch["segment_ids"]).aux["expert_load"])
    assert load.sum() == batch["loss_mask"].sum() * steps.config.model.moe.top_k
    new, metrics = steps.train(state, steps.place(batch))
    (bias,) = jax.tree.leaves(new.state)
    np.testing.assert_allclose(bias, step * np.sign(load.mean(-1, keepdims=True) - load), rtol=1e-6)
    np.testing.assert_allclose(metrics["max_load"], load.max(-1) / load.mean(-1), rtol=1e-6)


def test_balancing_moves_no_codebook(directory, batch):
    config = tiny(directory, optimizer=OPTIMIZER)
    attention = dataclasses.replace(config.model.attention, kv_lora_rank=32)
    model = dataclasses.replace(config.model, cache_format="nuq4", attention=attention)
    steps = Steps(dataclasses.replace(config, model=model))
    state, metrics = steps.train(steps.init(), steps.place(batch))
    for layers in state.state.values():
        codebooks = np.asarray(layers["attn"]["codebook"])
        np.testing.assert_array_equal(codebooks, np.tile(GAUSSIAN_CODEBOOK, (len(codebooks), 1)))
    assert np.any(state.state["moe_layers"]["moe"]["bias"]) and np.isfinite(metrics["loss"])


def test_a_step_that_is_not_finite_changes_nothing(steps, batch):
    state = steps.init()
    state, _ = steps.train(state, steps.place(batch))
    poisoned = state._replace(params=state.params | {"embed": state.params["embed"].at[0, 0].set(jnp.nan)})
    before = jax.tree.map(np.array, poisoned)
    once, metrics = steps.train(poisoned, steps.place(batch))
    assert not np.isfinite(float(metrics["grad_norm"]))
    assert (int(once.step), int(once.skipped), int(once.skipped_in_a_row)) == (2, 1, 1)
    after = jax.tree.map(np.array, once)
    for name in ("params", "state", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))

    twice, _ = steps.train(once, steps.place(batch))
    assert (int(twice.skipped), int(twice.skipped_in_a_row)) == (2, 2)
    healed = twice._replace(params=twice.params | {"embed": jnp.zeros_like(twice.params["embed"])})
    healed, metrics = steps.train(healed, steps.place(batch))
    assert (int(healed.step), int(healed.skipped), int(healed.skipped_in_a_row)) == (4, 2, 0)


def test_compiles_once_and_donates(directory, batch):
    steps = Steps(tiny(directory, optimizer=OPTIMIZER))
    state = steps.init()
    compiled = []
    listener = lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    placed = [steps.place(batch) for _ in range(4)]
    state, metrics = steps.train(state, placed[0])
    jax.block_until_ready(metrics)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        with jax.transfer_guard("disallow"):
            for b in placed[1:]:
                old = state
                state, metrics = steps.train(state, b)
                assert all(x.is_deleted() for x in jax.tree.leaves(old.params))
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert compiled == []
    assert int(state.step) == 4


def test_gradients_are_clipped(steps, batch):
    state, metrics = steps.train(steps.init(), steps.place(batch))
    assert float(metrics["grad_norm"]) > OPTIMIZER.clip_norm  # as it was before clipping
    mean = np.sqrt(sum(float(jnp.sum(m**2)) for m in jax.tree.leaves(state.opt_state[0].mu)))
    assert mean == pytest.approx(OPTIMIZER.clip_norm * (1 - OPTIMIZER.beta1), rel=1e-2)
