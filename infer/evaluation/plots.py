"""Pictures of an evaluation."""

import pathlib
import re
from typing import Any


def write(directory: pathlib.Path, result: dict[str, Any]) -> list[pathlib.Path]:
    """The pictures that `result` has data for; each is whole or not there."""
    import matplotlib

    matplotlib.use("Agg")
    written = []
    if "ppl" in result:
        written.append(_perplexity(directory / "perplexity.png", result))
    for name in result.get("needle", {}).get("variants", {}):
        file = re.sub(r"[^A-Za-z0-9]+", "-", name)
        written.append(_heat_map(directory / f"needle-{file}.png", result["needle"], name))
    return written


def _perplexity(path: pathlib.Path, result: dict[str, Any]) -> pathlib.Path:
    """Change of perplexity and its standard error against bytes per token."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for name, values in result["ppl"]["variants"].items():
        size, here = result["variants"][name]["bytes_per_token"], values["all"]
        if size is None:
            continue  # only simulated: no bytes to show
        axes.errorbar(
            [size], [here["perplexity_change_percent"]], yerr=[here["perplexity_change_error"] or 0.0],
            fmt="o", capsize=3, label=name,
        )  # fmt: skip
        axes.annotate(name, (size, here["perplexity_change_percent"]), (4, 4), textcoords="offset points")
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set(xlabel="bytes per token, all layers", ylabel="change of perplexity against bf16 (%)")
    axes.grid(alpha=0.3)
    return save(figure, path)


def _heat_map(path: pathlib.Path, found: dict[str, Any], name: str) -> pathlib.Path:
    """Hit rate of one variant by length and depth."""
    import matplotlib.pyplot as plt
    import numpy as np

    values = found["variants"][name]
    lengths = list(values["lengths"])
    rates = np.array([values["lengths"][n]["hit_rate_by_depth"] for n in lengths]).T
    figure, axes = plt.subplots(figsize=(1.5 + len(lengths), 1.5 + 0.35 * len(rates)))
    image = axes.imshow(rates, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=45)
    axes.set_yticks(range(len(rates)), [f"{depth:.0%}" for depth in found["depths"]])
    axes.set(xlabel="tokens", ylabel="depth", title=f"{name}: {values['hits']} of {values['trials']} found")
    figure.colorbar(image, label=f"hit rate ({found['trials_per_depth']} trials a cell)")
    return save(figure, path)


def save(figure: Any, path: pathlib.Path) -> pathlib.Path:
    """Write a figure beside `path` and rename it, then forget it."""
    import matplotlib.pyplot as plt

    beside = path.with_name(f".{path.name}")
    figure.savefig(beside, format="png", dpi=120, bbox_inches="tight")
    beside.replace(path)
    plt.close(figure)
    return path
