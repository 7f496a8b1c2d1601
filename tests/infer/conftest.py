import dataclasses
import os
import pathlib

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
    """For programs in subprocesses: compiled programs are kept between test runs."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(ROOT / ".cache" / "tests"),
    }
