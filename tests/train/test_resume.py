"""Killed and resumed training equals uninterrupted training, loss by loss, to the bit.

Real processes, real signals.
"""

import json
import pathlib
import random
import signal
import subprocess
import time

import pytest

from tests.train.tiny import ROOT, command, environment, losses, run

STEPS = 60
FLAGS = ("--steps", str(STEPS), "--checkpoint.interval", "10", "--eval-interval", "30")


def start(directory: pathlib.Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(directory, *FLAGS), cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True
    )


def last_step(directory: pathlib.Path) -> int:
    path = directory / "run" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    whole = [line for line in text.split("\n")[:-1] if line]
    return json.loads(whole[-1])["step"] if whole else 0


def wait_for(process: subprocess.Popen, condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() in (None, 0), f"failed:\n{process.stderr and process.stderr.read()}"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def finished_steps(directory: pathlib.Path) -> list[int]:
    steps = directory / "run" / "steps"
    return sorted(int(p.name) for p in steps.iterdir() if p.name.isdigit()) if steps.exists() else []


def being_saved(directory: pathlib.Path, after: int) -> bool:
    found = (directory / "run" / "steps").glob("*.orbax-checkpoint-tmp")
    return any(int(p.name.split(".")[0]) > after for p in found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[int, str]:
    directory = tmp_path_factory.mktemp("whole")
    result = run(directory, *FLAGS)
    assert result.returncode == 0, result.stderr
    found = losses(directory)
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


def test_killed_terminated_and_resumed(whole, tmp_path):
    # kill -9 between saves.
    process = start(tmp_path)
    wait_for(process, lambda: last_step(tmp_path) >= 14 and finished_steps(tmp_path))
    process.kill()
    process.communicate()
    (*_, saved) = finished_steps(tmp_path)

    # kill -9 while a checkpoint is being written.
    process = start(tmp_path)
    wait_for(process, lambda: being_saved(tmp_path, after=saved))
    process.kill()
    _, said = process.communicate()
    assert f"resumed from step {saved} " in said

    # SIGTERM: finishes the step, saves, and says so in its status.
    saved = max(finished_steps(tmp_path))
    lines = (tmp_path / "run" / "metrics.jsonl").stat().st_ino
    process = start(tmp_path)
    # The lines of steps that were lost are dropped first.
    wait_for(process, lambda: (tmp_path / "run" / "metrics.jsonl").stat().st_ino != lines)
    wait_for(process, lambda: last_step(tmp_path) > saved + 2)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert f"resumed from step {saved} " in said
    assert "SIGTERM: finishing this step and saving" in said
    saved = max(finished_steps(tmp_path))
    assert saved == last_step(tmp_path)

    result = run(tmp_path, *FLAGS, "--json")
    assert result.returncode == 0, result.stderr
    assert f"resumed from step {saved} " in result.stderr
    assert json.loads(result.stdout)["step"] == STEPS
    assert losses(tmp_path) == whole


def test_a_second_signal_stops_at_once(tmp_path):
    process = start(tmp_path)
    wait_for(process, lambda: last_step(tmp_path) >= 1)
    process.send_signal(signal.SIGSTOP)  # both signals arrive before the step can end
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=60)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_moments(whole, tmp_path, seed):
    rng = random.Random(seed)
    for _ in range(6):
        kill_somewhere(tmp_path, rng)
    result = run(tmp_path, *FLAGS)
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path) == whole


def kill_somewhere(directory: pathlib.Path, rng: random.Random) -> None:
    """Start, kill -9 at a random moment, half of the time during a save; check what the start resumed from."""
    before = max(finished_steps(directory), default=0)
    process = start(directory)
    if rng.random() < 0.5:
        wait_for(process, lambda: process.poll() is not None or being_saved(directory, before))
        time.sleep(rng.uniform(0, 0.02))
    else:
        wait_for(
            process, lambda: process.poll() is not None or (directory / "run" / "metrics.jsonl").exists()
        )
        time.sleep(rng.uniform(0, 2))
    process.kill()
    _, said = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), said
    if before:
        assert f"resumed from step {before} " in said


@pytest.mark.slow
def test_sharded_training_gives_the_losses_of_one_device(whole, tmp_path):
    # On four devices the sums have another order; a mesh must change nothing else.
    env = environment() | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    flags = [*FLAGS, "--mesh.fsdp", "2", "--mesh.expert", "2"]
    result = subprocess.run(command(tmp_path, *flags), cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for step, loss in losses(tmp_path).items():
        assert float.fromhex(loss) == pytest.approx(
            float.fromhex(whole[step]), rel=2e-2 if step > 10 else 1e-4
        )
