"""Wrong input gets one clear sentence and a status that tells the truth; nothing saved is lost."""

import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import time

import pytest

from mlaflax.checkpoint import Checkpoints
from mlaflax.config import ConfigError
from tests.train.tiny import ROOT, command, environment, run, tiny
from train.__main__ import main
from train.config import TrainConfig


def config_file(directory: pathlib.Path) -> str:
    return command(directory)[3]


def fails(capsys, *arguments: str, status: int = 2) -> str:
    """Run the program in this process; its one error sentence."""
    assert main(list(arguments)) == status
    out, err = capsys.readouterr()
    assert out == ""
    sentences = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1
    assert "Traceback" not in err
    return sentences[0]


def test_unknown_configuration_lists_the_known_nearest_first(capsys):
    message = fails(capsys, "dem")
    assert "CONFIG = 'dem'" in message
    known = message.split("there are ")[1]
    assert known.startswith("demo")
    assert "deepseek_v3" in known


def test_a_flag_in_place_of_the_configuration(capsys):
    assert "CONFIG must come first, before --steps" in fails(capsys, "--steps", "3")


def test_a_file_without_a_configuration(capsys, tmp_path):
    path = tmp_path / "c.py"
    path.write_text("x = 1\n")
    assert "must define `config`, a TrainConfig" in fails(capsys, str(path))
    path.write_text("import nonsense\n")
    assert "No module named 'nonsense'" in fails(capsys, str(path))
    path.write_text("from train.config import TrainConfig\nconfig = TrainConfig(steps=0)\n")
    assert "steps = 0: must be greater than 0" in fails(capsys, str(path))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--optimizer.learning-rat", "1"], "--optimizer.learning-rate"),
        (["--model.moe.top-k", "99"], "moe.top_k = 99: must lie between 1 and num_experts"),
        (["--model.attention.num-heads", "0"], "attention.num_heads = 0: must be greater than 0"),
        (["--model.attention.kv-lora-rank", "-1"], "attention.kv_lora_rank = -1: must be greater than 0"),
        (["--model.attention.qk-rope-head-dim", "7"], "attention.qk_rope_head_dim = 7: must be even"),
        (["--model.moe.num-experts", "-4"], "moe.num_experts = -4: must be 0 or more"),
        (["--optimizer.schedule", "linear"], "'cosine', 'wsd'"),
        (["--optimizer.accumulation", "3"], "optimizer.accumulation = 3: must divide data.batch_size"),
        (["--data.sequence-length", "999999"], "data.sequence_length = 999999: must not exceed"),
        (["--steps", "many"], "many"),
    ],
)
def test_wrong_flags(capsys, flags, expected):
    try:
        status = main(["demo", *flags])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    # The message is framed and wrapped.
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert expected in text
    assert "Traceback" not in text


def test_help_teaches(capsys):
    for arguments, expected in (
        (["--help"], ["python -m train demo", "Exit status", "deepseek_v3"]),
        (["demo", "--help"], ["--optimizer.learning-rate", "--model.moe.top-k", "--json", "peak"]),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in expected)
    # No flag without a sentence: what follows the flag would begin with its default.
    bare = re.findall(r"(--[\w.-]+)[^\n]*\n?[│ ]*\(default", out)
    assert not bare


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps = 0: must be greater than 0"),
        ({"max_nonfinite_steps": 0}, "max_nonfinite_steps = 0: must be greater than 0"),
        ({"eval_interval": -1}, "eval_interval = -1: must be 0 or more"),
        ({"target": "fourgram"}, "target = 'fourgram': must be one of 'none', 'bigram', 'trigram'"),
        ({"seed": 10**20}, f"seed = {10**20}: must not exceed 2147483647"),
        ({"steps": 5.5}, "steps = 5.5: must be a whole number"),
        ({"steps": 50}, r"optimizer.warmup_steps = 100: must be below steps \(50\)"),
    ],
)
def test_values_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**changes)


def test_vocabulary_smaller_than_the_tokenizer(capsys, tmp_path):
    assert main([config_file(tmp_path), "--steps", "3", "--json"]) == 0
    capsys.readouterr()
    tokenizer = str(tmp_path / "run" / "tokenizer.json")
    flags = [
        "--model.vocab-size",
        "260",
        "--data.tokenizer",
        tokenizer,
        "--checkpoint.directory",
        str(tmp_path / "b"),
    ]
    message = fails(capsys, config_file(tmp_path), *flags)
    assert "vocab_size = 260: must be at least" in message


def test_text_that_is_missing_empty_or_no_text(capsys, tmp_path):
    config = config_file(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "noise.txt").write_bytes(bytes(range(256)) * 4)
    for name in ("absent.jsonl", "empty.txt", "noise.txt"):
        assert name in fails(capsys, config, "--data.paths", str(tmp_path / name))
    assert not list((tmp_path / "run").rglob("*.json"))


def test_an_empty_path_is_not_the_current_directory(capsys, tmp_path):
    config = config_file(tmp_path)
    rule = "each must name a file, a directory or a pattern"
    assert f"data.paths = ('',): {rule}" in fails(capsys, config, "--data.paths", "")
    assert "data.tokenizer = '': must name a path" in fails(capsys, config, "--data.tokenizer", "")


@pytest.mark.parametrize("field", ["learning-rate", "epsilon", "weight-decay", "clip-norm"])
def test_infinite_settings(capsys, tmp_path, field):
    message = fails(capsys, config_file(tmp_path), f"--optimizer.{field}", "inf")
    assert f"optimizer.{field.replace('-', '_')} = inf: must be a finite number" in message


def test_a_stdout_that_is_gone_does_not_change_what_happened(capsys, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    for stdout in ("/dev/full", None):
        line = [*command(finished_run, "--checkpoint.directory", str(tmp_path / "run"), "--json")]
        target = open(stdout, "w") if stdout else subprocess.PIPE  # noqa: SIM115
        process = subprocess.Popen(
            line, cwd=ROOT, env=environment(), stdout=target, stderr=subprocess.PIPE, text=True
        )
        if stdout is None:
            process.stdout.close()  # the reader has left
        said = process.stderr.read()
        assert process.wait() == (1 if stdout else 0), said
        assert "Traceback" not in said and "Exception ignored" not in said
        assert ("cannot write to standard output: no space left on device" in said) == bool(stdout)


def test_a_mesh_that_does_not_fit_the_devices(capsys, tmp_path):
    assert "mesh" in fails(capsys, config_file(tmp_path), "--mesh.fsdp", "7")


def test_checkpoint_of_another_configuration(capsys, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    config = config_file(finished_run)
    where = ["--checkpoint.directory", str(tmp_path / "run")]
    message = fails(capsys, config, *where, "--model.num-layers", "3", "--data.batch-size", "8", status=1)
    assert "model.num_layers: 2 saved, 3 now" in message
    assert "data.batch_size: 4 saved, 8 now" in message
    assert "name another --checkpoint.directory" in message
    # What does not change the run's course is told, not refused.
    assert main([config, *where, "--optimizer.learning-rate", "0.5"]) == 0
    assert "optimizer.learning_rate: 0.01 saved, 0.5 now" in capsys.readouterr().err


def test_other_defaults_of_what_is_not_used_are_no_other_configuration(capsys, finished_run, tmp_path):
    """A run without a mixed cache, begun by a version whose mixed cache had other defaults."""
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "run" / "config.json"
    description = json.loads(file.read_text())
    for model in (description["model"], description["training"]["model"]):
        assert model["cache_format"] != "mixed"
        model["mixed"] |= {"cold": "fp4", "salient": 60}
    file.write_text(json.dumps(description))
    assert main([config_file(finished_run), "--checkpoint.directory", str(tmp_path / "run")]) == 0
    assert "mixed" not in capsys.readouterr().err


def test_half_written_and_damaged_checkpoints(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    steps = tmp_path / "run" / "steps"
    shutil.copytree(steps / "20", steps / "25.orbax-checkpoint-tmp")
    largest = max((p for p in (steps / "20").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, 10)
    # In a process of its own: what threads print does not reach capsys.
    result = run(finished_run, "--checkpoint.directory", str(tmp_path / "run"))
    assert result.returncode == 0
    err = result.stderr
    assert "Traceback" not in err and "Exception ignored" not in err
    assert "ignored the half-written checkpoint of step 25" in err
    assert "the checkpoint of step 20" in err and "is damaged" in err
    assert "resumed from step 15" in err
    with Checkpoints(tmp_path / "run", read_only=True) as checkpoints:
        assert checkpoints.latest() == 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_step(capsys, monkeypatch, tmp_path, number):
    def slow_start(*_):
        os.kill(os.getpid(), number)
        time.sleep(60)

    monkeypatch.setattr("train.__main__.train", slow_start)
    message = fails(capsys, config_file(tmp_path), status=128 + number)
    assert f"stopped by {number.name} before the first step" in message


def small_disk(directory: pathlib.Path) -> bool:
    """A file system of one megabyte at `directory`, where this process may mount one."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)]
    return shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0


def test_full_disk(tmp_path):
    """Each checkpoint takes some 400 kB. Without the right to mount, a limit on file sizes stands in."""
    flags = ["--checkpoint.keep", "9", "--checkpoint.interval", "4", "--json"]
    disk = tmp_path / "disk"
    flags += ["--checkpoint.directory", str(disk / "run")]
    mounted = small_disk(disk)
    options = {}
    if not mounted:
        assert run(tmp_path, *flags, "--steps", "4").returncode == 0
        options["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    try:
        result = subprocess.run(
            command(tmp_path, *flags), cwd=ROOT, env=environment(), capture_output=True, text=True, **options
        )
        assert result.returncode == 1, result.stderr
        error = json.loads(result.stdout)["error"]
        assert "could not save step" in error
        assert ("no space is left on the disk" if mounted else "file too large") in error
        assert "is intact" in error
        assert f"error: {error}" in result.stderr
        assert "Traceback" not in result.stderr
        kept = shutil.copytree(disk / "run", tmp_path / "kept")
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)
    with Checkpoints(kept, read_only=True) as checkpoints:
        assert f"the checkpoint of step {checkpoints.latest()} is intact" in error
    # With room again, training goes on from there.
    result = run(tmp_path, "--checkpoint.directory", str(kept))
    assert result.returncode == 0, result.stderr
    assert "resumed from step" in result.stderr


def test_tiny_is_valid(tmp_path):
    assert tiny(tmp_path).steps == 20
