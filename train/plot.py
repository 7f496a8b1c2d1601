"""The loss curve of a run as a PNG."""

import pathlib
from typing import Any


def plot_losses(lines: list[dict[str, Any]], baseline: tuple[str, float] | None, path: pathlib.Path) -> None:
    """Training and held-out loss over steps, in nats per token, from the lines of metrics.jsonl.

    Args:
      baseline: name and loss of an n-gram model on the held-out text.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o-")):
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    if baseline:
        axes.axhline(baseline[1], color="gray", linestyle="--", label=baseline[0])
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    beside = path.with_name(f".{path.name}")
    figure.savefig(beside, format="png", dpi=120, bbox_inches="tight")
    beside.replace(path)
    plt.close(figure)
