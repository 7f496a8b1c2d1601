import pathlib

import pytest

from tests.train.tiny import tiny
from train.loop import train
from train.terminal import Terminal


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The directory of a tiny run of 20 steps, trained without interruption; not to be changed."""
    directory = tmp_path_factory.mktemp("finished")
    summary = train(tiny(directory), Terminal())
    assert summary["status"] == "finished"
    return directory
