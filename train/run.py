"""Opening a run: its data, its functions, and its state, fresh or restored."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from mlaflax import codebook
from mlaflax.checkpoint import (
    Blueprint,
    CheckpointError,
    Checkpoints,
    differences,
    model_trees,
    read_codebooks,
    read_description,
    read_model_config,
    read_tokenizer,
    write_description,
)
from mlaflax.config import ConfigError, ModelConfig, from_dict, to_dict
from mlaflax.formats import GAUSSIAN_CODEBOOK
from mlaflax.sharding import make_mesh
from mlaflax.tokenizer import Tokenizer
from train.config import TrainConfig
from train.data import PreparedData, TrainIterator, prepare
from train.step import Steps, TrainState
from train.terminal import Terminal

# A change of these would make the rest of a run another run than the one that was begun.
_FIXED = ("data", "seed")
_NOT_FIXED = ("prefetch", "cache_dir")


@dataclasses.dataclass
class Run:
    """A run that is ready to go on after step `start` with `state`.

    Attributes:
      meta: what was saved beside the arrays; empty for a fresh run.
    """

    config: TrainConfig
    directory: pathlib.Path
    checkpoints: Checkpoints
    data: PreparedData
    batches: TrainIterator
    steps: Steps
    state: TrainState
    start: int
    meta: dict[str, Any]

    def save(self, state: TrainState, step: int, seconds: float, finished: str | None) -> None:
        """Begin to save `state` and the position in the data."""
        model = {"params": state.params, "state": state.state}
        meta = {"data": self.batches.get_state(), "seconds": seconds, "finished": finished}
        self.checkpoints.save(step, {"model": model, "training": _rest(state)}, meta)

    @property
    def finished(self) -> str | None:
        """Why nothing is left to do: "steps" or "target"; None if something is."""
        if self.meta.get("finished") == "target" and self.config.target != "none":
            return "target"
        return "steps" if self.start >= self.config.steps else None


@contextlib.contextmanager
def open_run(config: TrainConfig, terminal: Terminal) -> Iterator[Run]:
    """Open the run in `config.checkpoint.directory`: resume it if it was begun, else begin it.

    Raises:
      ConfigError: the configuration does not fit the data or the devices.
      CheckpointError: the directory holds another run, or nothing in it can be restored.
    """
    directory = pathlib.Path(config.checkpoint.directory)
    mesh = None if config.mesh.single else make_mesh(**config.mesh.sizes(), devices=None)
    with Checkpoints(directory, keep=config.checkpoint.keep) as checkpoints:
        begun = checkpoints.latest() is not None
        if begun:
            _check_same_run(config, directory, terminal)
        data = prepare(config.data, config.model.vocab_size, lambda what: terminal.say(f"preparing: {what}"))
        if begun:
            _check_tokenizer(data.tokenizer, directory)
        write_description(directory, config.model, data.tokenizer, config)
        steps = Steps(config, mesh)
        batches = data.train_iterator()
        if begun:
            state, start, meta = _restore(steps, checkpoints, terminal)
            batches.set_state(meta["data"])
        else:
            state, start, meta = steps.init(), 0, {}
            if config.checkpoint.initial:
                state = _initial(config.checkpoint.initial, steps, data.tokenizer, state, terminal)
            for note in checkpoints.notes:
                terminal.say(note)
        try:
            yield Run(config, directory, checkpoints, data, batches, steps, state, start, meta)
        finally:
            batches.close()


def _restore(steps: Steps, checkpoints: Checkpoints, terminal: Terminal) -> tuple[TrainState, int, dict]:
    shapes = steps.shapes
    model = {"params": shapes.params, "state": shapes.state}
    found = checkpoints.restore({"model": model, "training": _rest(shapes)})
    for note in found.notes:
        terminal.say(note)
    terminal.say(f"resumed from step {found.step} in {checkpoints.directory}")
    return TrainState(**found.trees["model"], **found.trees["training"]), found.step, found.meta


def _initial(
    directory: str, steps: Steps, tokenizer: Tokenizer, fresh: TrainState, terminal: Terminal
) -> TrainState:
    """`fresh` with the newest weights and expert biases of the run in `directory`.

    Codebooks are that run's, too: those it was trained with or those of its `codebook.json`; else they stay fresh.
    """
    config = steps.config
    try:
        with Checkpoints(directory, read_only=True) as checkpoints:
            saved = read_tokenizer(directory)
            if saved is None or saved.fingerprint != tokenizer.fingerprint:
                raise CheckpointError(
                    f"its tokenizer is {'missing' if saved is None else 'another one than the data gives'}; "
                    "data.tokenizer must name the one these weights were trained with"
                )
            saved_config = read_model_config(directory)
            # Whether there are codebooks follows from the cache that was simulated.
            same_arrays = dataclasses.replace(
                config.model,
                cache_format=saved_config.cache_format,
                rope_format=saved_config.rope_format,
                mixed=saved_config.mixed,
            )
            blueprint = Blueprint(same_arrays, steps.mesh)
            found = checkpoints.restore({"model": blueprint.shapes})
            trees = found.trees["model"]
            codebooks = blueprint.build(**trees).codebooks()
            if codebooks is None and (pathlib.Path(directory) / codebook.FILE_NAME).exists():
                codebooks = read_codebooks(directory, saved_config)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint.initial = {directory!r}: {error}") from None
    for note in found.notes:
        terminal.say(note)
    terminal.say(f"begun with the weights of step {found.step} in {directory}")
    model = Blueprint(same_arrays, steps.mesh).build(**trees)
    if config.checkpoint.rotate_latents:
        model, codebooks = model.rotated(), None  # levels fitted to other dims are of no use
        terminal.say("rotated its latents")
    if not config.model.uses_codebook:
        return fresh._replace(params=model_trees(model)["params"], state=_without_codebooks(trees["state"]))
    if codebooks is not None:
        terminal.say("taken its codebooks, too")
    levels = np.tile(GAUSSIAN_CODEBOOK, (config.model.num_layers, 1)) if codebooks is None else codebooks
    return fresh._replace(**model_trees(model.with_codebooks(jnp.asarray(levels))))


def _without_codebooks(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {name: _without_codebooks(inner) for name, inner in tree.items() if name != "codebook"}


def _rest(state: TrainState) -> dict[str, Any]:
    return {k: v for k, v in state._asdict().items() if k not in ("params", "state")}


def _check_same_run(config: TrainConfig, directory: pathlib.Path, terminal: Terminal) -> None:
    """Refuse to go on with a run of another model or other data; tell of whatever else has changed."""
    saved = read_description(directory)
    if saved is None:
        raise CheckpointError(f"{directory} holds checkpoints but no config.json, so their model is unknown")
    # Rebuilt, so that fields which are newer than the run count with their defaults.
    try:
        model = to_dict(from_dict(ModelConfig, saved["model"]))
        training = to_dict(from_dict(TrainConfig, saved["training"])) if saved["training"] else {}
    except (ConfigError, TypeError):
        model, training = saved["model"], saved["training"] or {}
    now = to_dict(config.model)
    if "mixed" not in (model.get("cache_format"), config.model.cache_format):
        model.pop("mixed", None)  # read by nothing; its defaults may have changed with a new version
        now.pop("mixed")
    changed = differences(model, now, "model.")
    told = []
    for line in differences(training, to_dict(config)):
        group, _, name = line.partition(":")[0].partition(".")
        if group in _FIXED and name not in _NOT_FIXED:
            changed.append(line)
        elif group not in ("model", "checkpoint"):
            told.append(line)
    if changed:
        raise CheckpointError(
            f"{directory} holds a checkpoint of another configuration ({'; '.join(changed)}): "
            "name another --checkpoint.directory, or delete that one"
        )
    for line in told:
        terminal.say(f"changed since the last start: {line}")


def _check_tokenizer(tokenizer: Tokenizer, directory: pathlib.Path) -> None:
    saved = read_tokenizer(directory)
    if saved is not None and saved.fingerprint != tokenizer.fingerprint:
        raise CheckpointError(
            f"{directory} was begun with another tokenizer than the data now gives: "
            "name another --checkpoint.directory, or restore the text it was trained on"
        )
