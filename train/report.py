"""What a run reports: metrics of steps, evaluations, and the summary at its end."""

import time
from typing import Any

from train.evaluate import Baseline, Evaluation
from train.flops import count_parameters, peak_flops, training_flops
from train.metrics import Metrics, read_lines
from train.plot import plot_losses
from train.run import Run
from train.terminal import Clock, Terminal, duration, progress_line


class Reporter:
    """Takes what the loop measures to metrics.jsonl, TensorBoard and the terminal."""

    def __init__(self, run: Run, baseline: Baseline | None, terminal: Terminal):
        config = run.config
        self._run, self._baseline, self._terminal = run, baseline, terminal
        self._metrics = Metrics(run.directory, run.start, config.tensorboard)
        self._tokens_per_step = config.data.batch_size * config.data.sequence_length
        self._flops = training_flops(config.model, config.data.sequence_length) * self._tokens_per_step
        self._peak = peak_flops()
        self._began = time.monotonic()
        self._clock = Clock()

    @property
    def seconds(self) -> float:
        """Time spent on the run, over all starts of the program."""
        return self._run.meta.get("seconds", 0.0) + time.monotonic() - self._began

    def begin(self) -> None:
        config, run, terminal = self._run.config, self._run, self._terminal
        total, active = count_parameters(config.model)
        terminal.say(
            f"{_count(total)} parameters, {_count(active)} active per token; "
            f"vocabulary {run.data.tokenizer.vocab_size}; {self._tokens_per_step:,} tokens a step"
        )
        if self._baseline:
            terminal.say(
                f"to beat: {self._baseline.name} with held-out perplexity {self._baseline.perplexity:.2f}"
            )
        terminal.start(run.start, config.steps)

    def step(self, step: int, values: dict[str, Any]) -> None:
        config = self._run.config
        self._clock.step()
        speed: dict[str, float] = {}
        left = None
        if seconds := self._clock.seconds_per_step:
            speed["tokens_per_second"] = self._tokens_per_step / seconds
            if self._peak:
                speed["mfu"] = self._flops / seconds / self._peak
            left = (config.steps - step) * seconds
        if step % config.log_interval == 0:
            self._metrics.write(step, values | speed)
        self._terminal.step(step, progress_line(values, speed, left))

    def evaluation(self, step: int, result: Evaluation) -> None:
        self._metrics.write(step, {"eval_loss": result.loss, "eval_perplexity": result.perplexity})
        versus = f" ({self._baseline.name} {self._baseline.perplexity:.2f})" if self._baseline else ""
        self._terminal.say(f"step {step}: held-out perplexity {result.perplexity:.2f}{versus}")

    def pause(self) -> None:
        """Make what was reported durable; time until the next step is not training speed."""
        self._metrics.flush()
        self._clock.pause()

    def close(self) -> None:
        self._terminal.stop()
        self._metrics.close()

    def summary(self, step: int, status: str) -> dict[str, Any]:
        """Draw the loss curve, show the summary, and return it as plain values."""
        run, baseline = self._run, self._baseline
        lines = read_lines(self._metrics.path)
        plot = run.directory / "loss.png"
        plot_losses(lines, baseline, plot)
        total, active = count_parameters(run.config.model)
        speeds = sorted(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)

        def last(name: str) -> Any:
            return next((line[name] for line in reversed(lines) if line.get(name) is not None), None)

        loads = last("max_load")
        summary = {
            "status": status,
            "directory": str(run.directory),
            "step": step,
            "tokens": step * self._tokens_per_step,
            "seconds": round(self.seconds, 1),
            "tokens_per_second": round(speeds[len(speeds) // 2], 1) if speeds else None,
            "loss": last("loss"),
            "eval_loss": last("eval_loss"),
            "eval_perplexity": last("eval_perplexity"),
            "baseline": baseline.name if baseline else None,
            "baseline_perplexity": baseline.perplexity if baseline else None,
            "skipped_steps": last("skipped") or 0,
            "busiest_expert": max(loads) if loads else None,
            "parameters": total,
            "active_parameters": active,
            "plot": str(plot),
        }
        self._terminal.summary(status, _readable(summary))
        return summary


def _readable(s: dict[str, Any]) -> dict[str, str]:
    rows = {
        "steps": f"{s['step']:,} ({s['tokens']:,} tokens) in {duration(s['seconds'])}",
        "parameters": f"{_count(s['parameters'])}, {_count(s['active_parameters'])} active per token",
    }
    if s["tokens_per_second"]:
        rows["speed"] = f"{s['tokens_per_second']:,.0f} tokens/s"
    if s["loss"] is not None:
        rows["last training loss"] = f"{s['loss']:.4f}"
    if s["eval_perplexity"] is not None:
        rows["held-out perplexity"] = f"{s['eval_perplexity']:.2f}"
    if s["baseline"]:
        rows[s["baseline"]] = f"{s['baseline_perplexity']:.2f}"
    if s["busiest_expert"]:
        rows["busiest expert"] = f"{s['busiest_expert']:.2f} times the mean load"
    if s["skipped_steps"]:
        rows["skipped steps"] = f"{s['skipped_steps']} (loss or gradient not finite)"
    rows["checkpoint"] = s["directory"]
    rows["loss curve"] = s["plot"]
    return rows


def _count(n: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)
