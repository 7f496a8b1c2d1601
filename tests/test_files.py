"""Whole files or none."""

import os

import pytest

from mlaflax.files import write_whole


def test_write_whole_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, "old")

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
