"""Fit the codebooks of the cache format nuq4 to a model's own latents.

Reads some of the text the model was trained on (or --text), fits 16 levels per layer by Lloyd's algorithm, and
writes codebook.json beside the checkpoint, where every program finds it. The table tells what each 4-bit format
loses of latents that were not used for fitting, as a share of their energy.

python -m infer calibrate --checkpoint runs/demo
"""

import dataclasses
import json
import pathlib
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from mlaflax.cache import LatentCache
from mlaflax.checkpoint import CheckpointError, load_model, read_description
from mlaflax.cli import Terminal
from mlaflax.codebook import fit_codebook, save_codebooks
from mlaflax.config import ConfigError, from_dict, require, require_positive
from mlaflax.formats import GAUSSIAN_CODEBOOK, get_format
from mlaflax.model import Transformer
from train.data import DataConfig, prepare


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Which model, and how much text.

    Attributes:
      checkpoint: directory of a training run; codebook.json is written there.
      text: file to read in place of the text the model was trained on.
      tokens: tokens to run; half of them to fit to, the other half to measure on.
      context: tokens in a row.
      step: training step of the checkpoint.
      json: print one JSON object on stdout in place of the table.
    """

    checkpoint: str
    text: str | None = None
    tokens: int = 16_384
    context: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 1024, or the model's)")
    ] = None
    step: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the newest)")] = (
        None
    )
    json: bool = False

    def __post_init__(self):
        require_positive(self, "", "tokens")
        if self.context is not None:
            require_positive(self, "", "context")


def run(arguments: Arguments, terminal: Terminal) -> int:
    with terminal.working(f"loading {arguments.checkpoint}"):
        loaded = load_model(arguments.checkpoint, arguments.step)
    model, config = loaded.model, loaded.config
    context = min(1024, config.max_length) if arguments.context is None else arguments.context
    require(
        context <= config.max_length, "context", context, f"must not exceed the model's {config.max_length}"
    )
    ids = _text(arguments, loaded, terminal)
    rows = min(arguments.tokens, len(ids)) // context
    require(rows >= 2, "tokens", min(arguments.tokens, len(ids)), f"must be two rows of {context} at least")
    # Spread over the text, so that both halves see all of it.
    starts = np.linspace(0, len(ids) - context, rows).astype(int)
    with terminal.working(f"running {rows} rows of {context} tokens"):
        latents = stored_latents(model, np.stack([ids[start : start + context] for start in starts]))
    c = config.latent_attention.kv_lora_rank
    levels, losses = [], []
    for layer, found in enumerate(latents):
        with terminal.working(f"fitting layer {layer + 1} of {len(latents)}"):
            fit_to, measure_on = (found[half::2].reshape(-1, c) for half in (0, 1))
            levels.append(fit_codebook(jnp.asarray(fit_to)))
            losses.append(
                {
                    "fp4": lost(measure_on, "fp4"),
                    "gaussian": lost(measure_on, "nuq4", GAUSSIAN_CODEBOOK),
                    "fitted": lost(measure_on, "nuq4", levels[-1]),
                }
            )
    notes = {"step": loaded.step, "rows": rows, "context": context, "text": arguments.text or "training text"}
    path = save_codebooks(arguments.checkpoint, jnp.asarray(np.stack(levels)), kv_lora_rank=c, notes=notes)
    if arguments.json:
        print(json.dumps({"codebook": str(path), **notes, "nmse": losses}))
    else:
        _show(losses)
        terminal.say(f"wrote {path}")
    return 0


def stored_latents(model: Transformer, tokens: np.ndarray) -> list[np.ndarray]:
    """The latents that a cache of each layer stores for these rows, exact: float32 `[rows, q, c]`."""
    length = tokens.shape[1]

    @jax.jit
    def of_row(row):
        cache = LatentCache.create(model.config, "f32", num_sequences=1, max_length=length)
        cache = model(row[None], cache=cache).cache
        assert cache is not None
        return [cache.read(layer, 0, length)["latent"] for layer in range(model.config.num_layers)]

    rows = [jax.device_get(of_row(jnp.asarray(row, jnp.int32))) for row in tokens]
    return [np.stack(layer) for layer in zip(*rows, strict=True)]


def lost(latents: np.ndarray, format: str, codebook: np.ndarray | None = None) -> float:
    """Squared error of rounding `[n, c]` latents over their squares."""
    rope = jnp.zeros((len(latents), 2))
    levels = None if codebook is None else jnp.asarray(codebook)
    rounded, _ = get_format(format).simulate(jnp.asarray(latents), rope, levels)
    return float(jnp.sum(jnp.square(rounded - latents)) / jnp.sum(jnp.square(latents)))


def _text(arguments: Arguments, loaded, terminal: Terminal) -> np.ndarray:
    if arguments.text is not None:
        if loaded.tokenizer is None:
            raise CheckpointError(
                f"{arguments.checkpoint} holds no tokenizer.json, so text means nothing to its model"
            )
        path = pathlib.Path(arguments.text)
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"text = {arguments.text!r}: must be a readable file of UTF-8 text ({error})"
            ) from None
        return np.asarray(loaded.tokenizer.encode(text), np.int32)
    description = read_description(arguments.checkpoint)
    training = (description or {}).get("training")
    if not training:
        raise ConfigError(
            f"{arguments.checkpoint} does not say what text it was trained on: name a file with --text"
        )
    data = prepare(from_dict(DataConfig, training["data"]), loaded.config.vocab_size, terminal.say)
    return np.asarray(data.train.tokens, np.int32)


def _show(losses: list[dict[str, float]]) -> None:
    table = Table(title="Lost of the latents, share of their energy", title_justify="left", box=None)
    for name in ("layer", "fp4", "nuq4, Gaussian levels", "nuq4, fitted levels"):
        table.add_column(name, justify="right")
    for layer, row in enumerate(losses):
        table.add_row(str(layer), *(f"{row[name]:.2e}" for name in ("fp4", "gaussian", "fitted")))
    Console().print(table)
