import dataclasses
import os
import pathlib

import jax
import pytest

from tests.train.tiny import MODEL, ROOT, tiny
from train.loop import train
from train.terminal import Terminal


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    """A run that really trained, for a few seconds; long enough contexts to interrupt."""
    directory = tmp_path_factory.mktemp("trained")
    config = tiny(directory, model=dataclasses.replace(MODEL, max_length=4096), steps=40, eval_interval=0)
    train(config, Terminal())
    return directory / "run"


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """For programs in subprocesses; with it they share this process's cache of compiled programs."""
    precision = str(jax.config.jax_default_matmul_precision)
    return {**os.environ, "JAX_DEFAULT_MATMUL_PRECISION": precision, "PYTHONPATH": str(ROOT)}
