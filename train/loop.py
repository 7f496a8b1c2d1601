"""The training loop."""

import math
from typing import Any

import jax

from train.config import TrainConfig
from train.evaluate import evaluate, make_baseline
from train.interrupt import Interrupt
from train.metrics import Late
from train.profile import Profile
from train.report import Reporter
from train.run import open_run
from train.terminal import Terminal


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what is kept."""


def train(config: TrainConfig, terminal: Terminal) -> dict[str, Any]:
    """Begin or resume the run in `config.checkpoint.directory`, and return its summary.

    The summary's `status` is "finished", "target reached", "target missed", or "stopped by SIGTERM" (SIGINT).

    Raises:
      ConfigError: the configuration does not fit the data or the devices.
      CheckpointError: the run cannot be saved or restored.
      TrainingError: the loss was not finite for `max_nonfinite_steps` steps in a row.
    """
    with open_run(config, terminal) as run:
        if config.target != "none":
            terminal.say(f"preparing: {config.target} to compare with")
        baseline = make_baseline(config, run.data, run.directory)
        to_beat = baseline.loss if baseline else -math.inf
        report, late, profile = Reporter(run, baseline, terminal), Late(), Profile(run, terminal)
        state, step, finished = run.state, run.start, run.finished
        del run.state  # donated by the first step

        def log(metrics) -> None:
            for number, values in metrics:
                report.step(number, values)
                if values["skipped_in_a_row"] >= config.max_nonfinite_steps:
                    raise TrainingError(_not_finite(number, values, run.checkpoints.latest()))

        try:
            report.begin()
            with Interrupt(lambda s: terminal.say(f"{s.name}: finishing this step and saving")) as interrupt:
                while not finished and not interrupt.signal:
                    profile.before(step + 1)
                    # Nothing may cross between host and devices here unless it is meant to.
                    with jax.transfer_guard("disallow"):
                        batch = run.steps.place(next(run.batches))
                        quantized = step >= config.quantize_from
                        state, metrics = run.steps.train(state, batch, quantized=quantized)
                    step += 1
                    log(late.push(step, metrics))
                    if step >= config.steps:
                        finished = "steps"

                    if finished or _every(config.eval_interval, step):
                        log(late.drain())
                        result = evaluate(run.steps, state, run.data, config.eval_batches)
                        if baseline and config.eval_batches and (finished or result.loss < to_beat):
                            # The baseline was scored on all held-out text.
                            result = evaluate(run.steps, state, run.data)
                        report.evaluation(step, result)
                        report.pause()
                        if result.loss < to_beat:
                            finished = "target"

                    if finished or interrupt.signal or _every(config.checkpoint.interval, step):
                        # First, so that no line is missing should the next start resume from here.
                        log(late.drain())
                        report.pause()
                        run.save(state, step, report.seconds, finished)
                    run.checkpoints.check()
                run.checkpoints.wait()
        finally:
            profile.close()
            report.close()
        if interrupt.signal and not finished:
            return report.summary(step, f"stopped by {interrupt.signal.name}") | {
                "signal": int(interrupt.signal)
            }
        missed = baseline is not None and finished != "target"
        reached = "target reached" if finished == "target" else "finished"
        return report.summary(step, "target missed" if missed else reached)


def _every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


def _not_finite(step: int, values: dict[str, Any], latest: int | None) -> str:
    kept = "no checkpoint was saved yet" if latest is None else f"the checkpoint of step {latest} is intact"
    return (
        f"stopped at step {step}: loss {values['loss']} and gradient norm {values['grad_norm']} were not finite "
        f"for {values['skipped_in_a_row']} steps in a row (max_nonfinite_steps); none of them was applied; {kept}"
    )
