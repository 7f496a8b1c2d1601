"""Codebooks fitted to a run's own latents, by the program."""

import json

import numpy as np
import pytest

from infer.__main__ import main
from mlaflax.checkpoint import load_model
from mlaflax.formats import GAUSSIAN_CODEBOOK
from tests.train.test_quantized import WIDE
from tests.train.tiny import tiny
from train.loop import train
from train.terminal import Terminal


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("calibrate")
    train(tiny(directory, model=WIDE, steps=4), Terminal())
    return directory / "run"


def test_the_model_loads_with_levels_that_lose_less(trained, capsys):
    assert load_model(trained).model.codebooks() is None
    assert main(["calibrate", "--checkpoint", str(trained), "--tokens", "512", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["fitted"] < row["gaussian"] for row in told["nmse"]] == [True, True]
    levels = np.asarray(load_model(trained).model.codebooks())
    assert levels.shape == (2, 16) and (np.diff(levels, axis=1) > 0).all()
    assert np.abs(levels - GAUSSIAN_CODEBOOK).max() > 1e-3


def test_what_cannot_be_is_said(trained, capsys):
    for flags, said in (
        (["--context", "4096"], "context = 4096: must not exceed the model's 64"),
        (["--tokens", "70"], "tokens = 70: must be two rows of 64 at least"),
        (["--text", "/nowhere.txt"], "text = '/nowhere.txt': must be a readable file of UTF-8 text"),
    ):
        assert main(["calibrate", "--checkpoint", str(trained), *flags]) == 2
        assert said in capsys.readouterr().err
