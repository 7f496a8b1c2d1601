"""Runs that begin with the weights of another."""

import dataclasses
import pathlib
import shutil

import jax
import numpy as np
import pytest

from mlaflax.checkpoint import CheckpointError, load_model, model_trees
from mlaflax.config import ConfigError
from tests.train.tiny import MODEL, losses, tiny
from train.config import CheckpointConfig, TrainConfig
from train.data import DataConfig
from train.loop import train
from train.run import open_run
from train.terminal import Terminal


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> TrainConfig:
    """A finished run of a few steps."""
    config = tiny(tmp_path_factory.mktemp("base"), steps=6, eval_interval=0, eval_batches=1)
    train(config, Terminal())
    return config


def after(base: TrainConfig, directory: pathlib.Path, interval: int = 3, **changes) -> TrainConfig:
    """A run in `directory` that begins with `base`'s weights."""
    checkpoint = CheckpointConfig(str(directory / "run"), interval, keep=9, initial=base.checkpoint.directory)
    return dataclasses.replace(base, checkpoint=checkpoint, **changes)


def test_weights_are_taken_and_nothing_else(base, tmp_path):
    with open_run(after(base, tmp_path, seed=1), Terminal()) as run, open_run(base, Terminal()) as old:
        fresh = run.steps.init()
        assert run.start == 0 and int(run.state.step) == 0 and int(old.state.step) == 6
        want = model_trees(load_model(base.checkpoint.directory).model)
        jax.tree.map(np.testing.assert_array_equal, run.state.params, want["params"])
        jax.tree.map(np.testing.assert_array_equal, run.state.state, want["state"])
        jax.tree.map(np.testing.assert_array_equal, run.state.opt_state, fresh.opt_state)
        np.testing.assert_array_equal(run.state.rng, fresh.rng)
        assert np.any(np.asarray(run.state.params["embed"]) != np.asarray(fresh.params["embed"]))
        assert any(np.any(np.asarray(x)) for x in jax.tree.leaves(run.state.state))  # the experts' biases
        np.testing.assert_array_equal(next(run.batches)["tokens"].shape, (4, 32))


def test_a_stopped_run_goes_on_with_its_own_weights(base, tmp_path):
    changes = {"steps": 9, "eval_interval": 0, "eval_batches": 1}
    train(after(base, tmp_path / "whole", **changes), Terminal())
    # Stopped as a killed run is: its newest checkpoint is of step 3, and the first run is no longer there.
    there = tmp_path / "base"
    shutil.copytree(base.checkpoint.directory, there)
    moved = dataclasses.replace(base, checkpoint=dataclasses.replace(base.checkpoint, directory=str(there)))
    config = after(moved, tmp_path / "parts", **changes)
    train(config, Terminal())
    for step in (6, 9):
        shutil.rmtree(tmp_path / "parts" / "run" / "steps" / str(step), ignore_errors=True)
    shutil.rmtree(there)
    train(config, Terminal())
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_weights_that_cannot_be_taken(base, tmp_path):
    where = f"checkpoint.initial = '{base.checkpoint.directory}': "

    def refusal(config: TrainConfig) -> str:
        with pytest.raises(CheckpointError) as error, open_run(config, Terminal()):
            pass
        return str(error.value)

    wide = dataclasses.replace(MODEL, mlp_size=64)
    said = refusal(after(base, tmp_path / "wide", model=wide))
    assert said.startswith(where) and "model.params.dense_layers.mlp.down is (1, 48, 32) in it" in said
    assert "(1, 64, 32) by the configuration" in said

    data = dataclasses.replace(base.data, max_documents=30)
    said = refusal(after(base, tmp_path / "tokens", data=data))
    assert said.startswith(where) and "its tokenizer is another one than the data gives" in said

    elsewhere = dataclasses.replace(
        base, checkpoint=dataclasses.replace(base.checkpoint, directory=str(tmp_path / "nowhere"))
    )
    said = refusal(after(elsewhere, tmp_path / "absent"))
    assert "checkpoint.initial = " in said and "nowhere" in said and "it does not exist" in said
    # Nothing that was refused keeps a later start from beginning there.
    with open_run(after(base, tmp_path / "wide"), Terminal()) as run:
        assert run.start == 0

    with pytest.raises(ConfigError, match=r"checkpoint.initial = '': must name a directory"):
        CheckpointConfig(initial="")


def test_positions_must_have_room_in_the_model():
    with pytest.raises(
        ConfigError, match=r"data.position_span = 128: must not exceed model.max_length \(64\)"
    ):
        TrainConfig(model=MODEL, data=DataConfig(sequence_length=64, needle_share=0.5, position_span=128))
