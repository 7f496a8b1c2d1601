"""The training program as a whole, inside this process."""

import dataclasses
import json
import os
import pathlib
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlaflax.checkpoint import Checkpoints, load_model
from tests.train.tiny import MODEL, losses, tiny
from train.__main__ import main
from train.evaluate import Baseline
from train.loop import TrainingError, train
from train.step import Steps
from train.terminal import Terminal


class Recording(Terminal):
    """Keeps what was said, and calls `at_step(step)` when a step is reported."""

    def __init__(self, at_step=lambda step: None):
        super().__init__()
        self.said: list[str] = []
        self._at_step = at_step

    def say(self, text: str) -> None:
        self.said.append(text)

    def step(self, step: int, line: str) -> None:
        self._at_step(step)
        super().step(step, line)


def lines(directory: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


def test_learns_and_reports(finished_run):
    steps = [line for line in lines(finished_run) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 21))
    assert steps[0]["loss"] == pytest.approx(np.log(300), rel=0.02)  # uniform at first
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    evaluations = [line for line in lines(finished_run) if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [10, 20]
    assert evaluations[1]["eval_loss"] < evaluations[0]["eval_loss"]
    assert evaluations[0]["eval_perplexity"] == pytest.approx(np.exp(evaluations[0]["eval_loss"]))
    assert (finished_run / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_checkpoints_are_kept_as_asked(finished_run):
    with Checkpoints(finished_run / "run", read_only=True) as checkpoints:
        assert checkpoints.steps() == [15, 20]


def test_a_finished_run_has_nothing_left_to_do(finished_run):
    before = (finished_run / "run" / "metrics.jsonl").read_text()
    summary = train(tiny(finished_run), Recording())
    assert (summary["status"], summary["step"]) == ("finished", 20)
    assert summary["eval_perplexity"] == lines(finished_run)[-1]["eval_perplexity"]
    assert (finished_run / "run" / "metrics.jsonl").read_text() == before


def test_the_model_decodes_what_was_trained(finished_run):
    model, tokenizer, config, step = load_model(finished_run / "run")
    assert (step, config) == (20, MODEL)
    tokens = np.array([tokenizer.encode("the cat sat on the mat and then")])
    logits = model.logits(model(tokens).hidden)
    log_p = jax.nn.log_softmax(logits)[0, np.arange(tokens.shape[1] - 1), tokens[0, 1:]]
    assert -float(log_p.mean()) < 0.7 * np.log(300)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_next_start_goes_on(finished_run, tmp_path, number):
    def interrupt(step):
        if step == 7:
            os.kill(os.getpid(), number)

    terminal = Recording(interrupt)
    summary = train(tiny(tmp_path), terminal)
    assert summary["status"] == f"stopped by {number.name}"
    assert 7 <= summary["step"] < 13
    assert f"{number.name}: finishing this step and saving" in terminal.said
    with Checkpoints(tmp_path / "run", read_only=True) as checkpoints:
        assert checkpoints.latest() == summary["step"]

    terminal = Recording()
    assert train(tiny(tmp_path), terminal)["status"] == "finished"
    assert any(f"resumed from step {summary['step']}" in s for s in terminal.said)
    assert losses(tmp_path) == losses(finished_run)
    whole, pieces = ([x.get("eval_loss") for x in lines(d)] for d in (finished_run, tmp_path))
    assert whole == pieces


def test_nonfinite_losses_stop_training_and_keep_the_checkpoint(tmp_path, monkeypatch):
    train(tiny(tmp_path, steps=5), Recording())
    forward = Steps._forward

    def overflowing(self, *args):
        loss, aux = forward(self, *args)
        return loss * jnp.inf, aux

    monkeypatch.setattr(Steps, "_forward", overflowing)
    with pytest.raises(TrainingError) as error:
        train(tiny(tmp_path, max_nonfinite_steps=3), Recording())
    assert re.search(
        r"^stopped at step 8: .* 3 steps in a row .*the checkpoint of step 5 is intact$", str(error.value)
    )
    skipped = [line["skipped_in_a_row"] for line in lines(tmp_path) if line["step"] > 5]
    assert skipped[:3] == [1, 2, 3]
    monkeypatch.undo()
    assert train(tiny(tmp_path), Recording())["status"] == "finished"


def test_target_reached_stops_early(tmp_path, monkeypatch):
    monkeypatch.setattr("train.loop.make_baseline", lambda *_: Baseline("n-gram", 4.5))
    config = tiny(tmp_path, target="bigram", eval_interval=2, eval_batches=1)
    summary = train(config, Recording())
    assert summary["status"] == "target reached"
    assert summary["step"] < 20
    assert summary["eval_perplexity"] < summary["baseline_perplexity"]
    again = train(config, Recording())
    assert (again["status"], again["step"]) == ("target reached", summary["step"])


def test_target_missed_is_a_failure(tmp_path, capsys):
    (tmp_path / "config.py").write_text(
        f"import pathlib\nfrom tests.train.tiny import tiny\nconfig = tiny(pathlib.Path({str(tmp_path)!r}))\n"
    )
    flags = ["--steps", "3", "--target", "trigram", "--tensorboard", "--profile", "--json"]
    assert main([str(tmp_path / "config.py"), *flags]) == 1
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary["status"] == "target missed"
    assert 1 < summary["baseline_perplexity"] < summary["eval_perplexity"]
    assert "to beat: Kneser-Ney trigram" in err
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_dense_models_train_too(tmp_path):
    model = dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, num_experts=0))
    summary = train(tiny(tmp_path, model=model, steps=3), Recording())
    assert (summary["status"], summary["busiest_expert"]) == ("finished", None)


def test_profile_writes_a_trace(tmp_path):
    train(tiny(tmp_path, steps=12, profile=True, eval_interval=0), Recording())
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
