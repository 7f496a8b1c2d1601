"""Checkpoints: what training saves, and models to decode with restored from it.

    model, tokenizer, config, step = load_model("runs/demo")

A directory holds

    config.json, tokenizer.json     the model's configuration, and its tokenizer
    steps/STEP/model                params, expert biases, codebooks   Orbax
    steps/STEP/training             optimiser state and counters       Orbax
    steps/STEP/meta                 data position, fingerprints        JSON

Every file is written beside its target and renamed, so whatever has its final name is whole. Orbax does not
notice a flipped bit inside an array, so each array's fingerprint is saved too and compared on restoring.
"""

import contextlib
import errno
import functools
import json
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from mlaflax import codebook
from mlaflax.config import ConfigError, ModelConfig, from_dict, to_dict
from mlaflax.files import write_whole
from mlaflax.model.transformer import Transformer
from mlaflax.orbax_noise import dropping_what_failed, quiet_orbax
from mlaflax.sharding import state_shardings
from mlaflax.tokenizer import Tokenizer

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

Tree = Any
_FORMAT = 1
_UNFINISHED = re.compile(r"(\d+)\.orbax-checkpoint-tmp")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names the directory, the step and the reason."""


class AnotherModelError(CheckpointError):
    """A checkpoint that is whole, but of a model with other arrays; the message names the first that differs."""


class Loaded(NamedTuple):
    """A restored model with what belongs to it; `tokenizer` is None where none was saved."""

    model: Transformer
    tokenizer: Tokenizer | None
    config: ModelConfig
    step: int


class Restored(NamedTuple):
    """`trees` and `meta` as they were saved at `step`; `notes` says in sentences what was passed over."""

    step: int
    trees: dict[str, Tree]
    meta: dict[str, Any]
    notes: list[str]


# --- Models as trees of arrays -------------------------------------------------------------------------------


def model_trees(model: nnx.Module) -> dict[str, Tree]:
    """The arrays of `model` as nested dicts: `params`, and `state` for all else (expert biases, codebooks)."""
    params, state = nnx.state(model, nnx.Param, ...)
    return {"params": nnx.to_pure_dict(params), "state": nnx.to_pure_dict(state)}


class Blueprint:
    """A model without its arrays: their shapes and shardings, and the way to put arrays in.

    `shapes` is what `model_trees` returns, with `jax.ShapeDtypeStruct`s in place of arrays.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh | None = None):
        abstract = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
        self.graphdef, self._params, self._state = nnx.split(abstract, nnx.Param, ...)
        self.shapes = {
            name: jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                nnx.to_pure_dict(tree),
                nnx.to_pure_dict(_shardings(tree, mesh)),
            )
            for name, tree in (("params", self._params), ("state", self._state))
        }

    def build(self, params: Tree, state: Tree) -> Transformer:
        """The model around these arrays; may be called inside a jitted function."""
        return nnx.merge(self.graphdef, _fill(self._params, params), _fill(self._state, state))


def _shardings(tree: nnx.State, mesh: Mesh | None) -> Tree:
    if mesh is None:
        return jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), tree)
    return state_shardings(tree, mesh)


def _fill(template: nnx.State, arrays: Tree) -> nnx.State:
    state = jax.tree.map(lambda x: x, template)
    nnx.replace_by_pure_dict(state, arrays)
    return state


# --- Saving and restoring ------------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of one training run. Saving is asynchronous; the newest `keep` are kept.

    Args:
      directory: made if need be, unless `read_only`.
      keep: finished checkpoints to keep.
      read_only: change nothing on disk.
      in_flight_bytes: of the arrays that are compressed and written at a time, which holds them once or twice more;
        more than the largest array has. Default: all of them at once.

    Raises:
      CheckpointError: another process writes to the directory, or it cannot be used.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep: int = 2,
        read_only: bool = False,
        in_flight_bytes: int | None = None,
    ):
        quiet_orbax()
        self.directory = pathlib.Path(directory).absolute()
        self.read_only = read_only
        self._in_flight_bytes = in_flight_bytes
        self._steps = self.directory / "steps"
        if read_only and not self._steps.is_dir():
            raise CheckpointError(f"{directory} holds no checkpoint: {_what_is_there(self.directory)}")
        self.notes = [
            f"ignored the half-written checkpoint of step {step}: its save was cut short"
            for step in self.unfinished()
        ]
        with _reported(f"cannot use {directory} for checkpoints"):
            if not read_only:
                self._steps.mkdir(parents=True, exist_ok=True)
                self._lock = _lock(self.directory)
                self._remove_unfinished()
            options = ocp.CheckpointManagerOptions(
                max_to_keep=None if read_only else keep, create=not read_only, read_only=read_only
            )
            handlers = None
            if in_flight_bytes is not None:
                limited = ocp.PyTreeCheckpointHandler(save_concurrent_gb=in_flight_bytes / 1e9)  # pyright: ignore
                handlers = {"model": limited, "meta": ocp.JsonCheckpointHandler()}
            self._manager = ocp.CheckpointManager(self._steps, options=options, item_handlers=handlers)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        # A failed save was reported when it was waited for; closing must not report it twice.
        with contextlib.suppress(Exception):
            self._manager.close()
        if self._lock is not None:
            self._lock.close()

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def require_step(self, step: int | None) -> None:
        """Raise `CheckpointError` unless there is a finished checkpoint of that step; None: of any."""
        steps = self.steps()
        if step is not None and step not in steps:
            raise CheckpointError(
                f"step = {step}: {self.directory} holds no checkpoint of that step; "
                f"it has {', '.join(map(str, steps)) or 'none'}"
            )
        if not steps:
            raise CheckpointError(
                f"{self.directory} holds no finished checkpoint" + "".join(f"; {n}" for n in self.notes)
            )

    def unfinished(self) -> list[int]:
        """Steps whose save was cut short."""
        if not self._steps.is_dir():
            return []
        return sorted({int(m[1]) for p in self._steps.iterdir() if (m := _UNFINISHED.match(p.name))})

    def _remove_unfinished(self) -> None:
        if jax.process_index() == 0:
            for path in self._steps.iterdir():
                if _UNFINISHED.match(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def save(self, step: int, trees: Mapping[str, Tree], meta: Mapping[str, Any]) -> None:
        """Begin to save; returns once the arrays may be overwritten. `meta` must be JSON.

        Raises:
          CheckpointError: this save, or the one before it, failed; finished checkpoints are intact.
        """
        self.wait()
        meta = {**meta, "fingerprints": {name: _fingerprints(tree) for name, tree in trees.items()}}
        if self._in_flight_bytes is None:
            items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        else:
            items = {
                name: ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=self._in_flight_bytes)
                for name, tree in trees.items()
            }
        self._saving = step
        with self._save_reported():
            self._manager.save(
                step, args=ocp.args.Composite(**items, meta=ocp.args.JsonSave(meta)), force=True
            )

    def check(self) -> None:
        """Raise `CheckpointError` if the save under way has failed; does not wait."""
        with self._save_reported():
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Wait until the save under way is finished.

        Raises:
          CheckpointError: it failed.
        """
        with self._save_reported():
            self._manager.wait_until_finished()

    _saving: int | None = None
    _lock: IO[str] | None = None

    @contextlib.contextmanager
    def _save_reported(self) -> Iterator[None]:
        try:
            with _reported(f"could not save step {self._saving} to {self.directory}"):
                yield
        except CheckpointError as error:
            self._remove_unfinished()
            latest = max((int(p.name) for p in self._steps.iterdir() if p.name.isdigit()), default=None)
            kept = (
                "no checkpoint was finished"
                if latest is None
                else f"the checkpoint of step {latest} is intact"
            )
            raise CheckpointError(f"{error}; {kept}") from error.__cause__

    def restore(self, shapes: Mapping[str, Tree], step: int | None = None) -> Restored:
        """Restore the trees named in `shapes`, placed as their `ShapeDtypeStruct`s say.

        Without a step: the newest undamaged one. Damaged ones met on the way are named in `notes` and, unless
        `read_only`, renamed to STEP.damaged, so that training can save that step again.

        Raises:
          CheckpointError: there is no such step, or it is damaged.
        """
        steps = self.steps()
        notes = list(self.notes)
        self.require_step(None)
        if step is not None:
            self.require_step(step)
            return self._restore(shapes, step, notes)
        for candidate in reversed(steps):
            try:
                return self._restore(shapes, candidate, notes)
            except AnotherModelError:
                raise
            except CheckpointError as error:
                notes.append(str(error))
                if not self.read_only:
                    self._set_aside(candidate)
        raise CheckpointError("; ".join(notes) + "; no undamaged checkpoint is left")

    def _require_same_arrays(self, shapes: Mapping[str, Tree], step: int) -> None:
        for name, tree in shapes.items():
            try:
                # The manager knows no metadata of what it has not restored yet.
                with ocp.PyTreeCheckpointer() as reader:
                    saved = reader.metadata(self._steps / str(step) / name).item_metadata.tree
            except Exception:
                continue  # damaged, then: restoring says how
            there, here = (
                {p: tuple(x.shape) for p, x in _flat(t) if hasattr(x, "shape")} for t in (saved, tree)
            )
            differing = [
                f"{name}{path} is {there.get(path, 'absent')} in it, {here.get(path, 'absent')} by the configuration"
                for path in {**here, **there}
                if there.get(path) != here.get(path)
            ]
            if differing:
                more = f" (and {len(differing) - 1} more arrays)" if len(differing) > 1 else ""
                raise AnotherModelError(
                    f"the checkpoint of step {step} in {self.directory} is of another model: {differing[0]}{more}"
                )

    def _restore(self, shapes: Mapping[str, Tree], step: int, notes: list[str]) -> Restored:
        self._require_same_arrays(shapes, step)
        items = {name: ocp.args.StandardRestore(tree) for name, tree in shapes.items()}
        with _reported(f"the checkpoint of step {step} in {self.directory} is damaged"):
            with dropping_what_failed():
                found = self._manager.restore(
                    step, args=ocp.args.Composite(**items, meta=ocp.args.JsonRestore())
                )
            meta = dict(found["meta"])
            saved = meta.pop("fingerprints")
            trees = {}
            for name in shapes:
                trees[name] = found[name]
                for path, value in _fingerprints(found[name]).items():
                    if saved[name].get(path) != value:
                        raise ValueError(f"{name}{path} does not have the contents that were saved")
        return Restored(step, trees, meta, notes)

    def _set_aside(self, step: int) -> None:
        if jax.process_index() == 0:
            target = self._steps / f"{step}.damaged"
            shutil.rmtree(target, ignore_errors=True)
            (self._steps / str(step)).rename(target)
        self._manager.reload()


def save_model(
    directory: str | os.PathLike, model: Transformer, tokenizer: Tokenizer | None = None, step: int = 0
) -> None:
    """Save a model as `load_model` opens it: parameters, expert biases and codebooks, no training state.

    Args:
      model: stacked, with its configuration.
      tokenizer: saved beside it; one that is there already stays when this is None.

    Raises:
      CheckpointError: it cannot be written; with the reason.
    """
    write_description(directory, model.config, tokenizer)
    trees = model_trees(model)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(trees))
    with Checkpoints(directory, in_flight_bytes=max(largest + 1, 64 << 20)) as checkpoints:
        checkpoints.save(step, {"model": trees}, {})
        checkpoints.wait()


def load_model(directory: str | os.PathLike, step: int | None = None, mesh: Mesh | None = None) -> Loaded:
    """The model saved in `directory`, its tokenizer and configuration; no optimiser state is read.

    A `codebook.json` beside it, as `python -m infer calibrate` writes it, gives the model its codebooks unless it was
    trained with some.

    Args:
      step: default: the newest one.
      mesh: where the parameters go; default: the first local device.

    Raises:
      CheckpointError: there is no such checkpoint, or it is damaged.
    """
    with Checkpoints(directory, read_only=True) as checkpoints:
        config = read_model_config(directory)
        blueprint = Blueprint(config, mesh)
        found = checkpoints.restore({"model": blueprint.shapes}, step)
    for note in found.notes:
        logging.getLogger("mlaflax").warning("%s", note)
    model = blueprint.build(**found.trees["model"])
    if model.codebooks() is None and (pathlib.Path(directory) / codebook.FILE_NAME).exists():
        model = model.with_codebooks(jnp.asarray(read_codebooks(directory, config)))
    return Loaded(model, read_tokenizer(directory), config, found.step)


def read_codebooks(directory: str | os.PathLike, config: ModelConfig) -> np.ndarray:
    """The levels in `codebook.json`, float32 `[layers, 16]`.

    Raises:
      CheckpointError: the file cannot be read, is damaged, or belongs to another model or version.
    """
    try:
        return codebook.load_codebooks(
            directory, num_layers=config.num_layers, kv_lora_rank=config.latent_attention.kv_lora_rank
        )
    except (ConfigError, OSError) as error:
        raise CheckpointError(str(error)) from error


# --- config.json and tokenizer.json --------------------------------------------------------------------------


def write_description(
    directory: str | os.PathLike, model: ModelConfig, tokenizer: Tokenizer | None, training: Any = None
) -> None:
    """Write `config.json` and `tokenizer.json`. `training` is any configuration dataclass, kept beside the model's."""
    content = {
        "format": _FORMAT,
        "model": to_dict(model),
        "training": to_dict(training) if training else None,
    }
    with _reported(f"cannot write to {directory}"):
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
        write_whole(pathlib.Path(directory) / "config.json", json.dumps(content, indent=1) + "\n")
        if tokenizer is not None:
            write_whole(pathlib.Path(directory) / "tokenizer.json", tokenizer.to_json())


def read_description(directory: str | os.PathLike) -> dict[str, Any] | None:
    """`config.json` as `write_description` wrote it, or None where there is none.

    Raises:
      CheckpointError: it cannot be read, or comes from a newer version.
    """
    path = pathlib.Path(directory) / "config.json"
    try:
        content = json.loads(path.read_text())
        written = content["format"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {_reason(error)}") from error
    if written != _FORMAT:
        raise CheckpointError(f"{path}: format = {written!r}: this version reads format {_FORMAT}")
    return content


def read_model_config(directory: str | os.PathLike) -> ModelConfig:
    """The model's configuration from `config.json`.

    Raises:
      CheckpointError: it is missing, damaged or not valid.
    """
    content = read_description(directory)
    if content is None:
        raise CheckpointError(f"{directory} holds no config.json, so its model is unknown")
    try:
        return from_dict(ModelConfig, content["model"])
    except (ConfigError, TypeError, KeyError) as error:
        raise CheckpointError(f"{pathlib.Path(directory) / 'config.json'}: {error}") from error


def read_tokenizer(directory: str | os.PathLike) -> Tokenizer | None:
    """The tokenizer saved with the model, or None.

    Raises:
      CheckpointError: it is damaged.
    """
    path = pathlib.Path(directory) / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return Tokenizer.load(path)
    except (ConfigError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {_reason(error)}") from error


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The fields in which two configurations differ, one sentence each: `num_layers: 4 saved, 6 now`."""
    found = []
    for name in dict.fromkeys([*saved, *now]):
        old, new = (side.get(name, "absent") for side in (saved, now))
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{prefix}{name}.")
        elif _plain(old) != _plain(new):
            found.append(f"{prefix}{name}: {old!r} saved, {new!r} now")
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value  # JSON has no tuples


# --- Fingerprints and errors ---------------------------------------------------------------------------------


def _flat(tree: Tree) -> list[tuple[str, Any]]:
    """Every leaf with its path, written alike for dicts, lists, tuples and named tuples."""
    return [(_path(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _fingerprints(tree: Tree) -> dict[str, int]:
    flat = _flat(tree)
    if not flat:
        return {}
    leaves = [leaf for _, leaf in flat]
    alone = all(isinstance(x, jax.Array) and len(x.sharding.device_set) == 1 for x in leaves)
    values = jax.device_get(_sums(leaves, alone))
    return {path: int(value) for (path, _), value in zip(flat, values, strict=True)}


def _path(path: tuple) -> str:
    # A tree may come back with lists and dicts where tuples and named tuples were saved.
    return "".join(f".{getattr(key, 'name', getattr(key, 'key', getattr(key, 'idx', key)))}" for key in path)


@functools.partial(jax.jit, static_argnums=1)
def _sums(leaves: list[jax.Array], in_blocks: bool) -> list[jax.Array]:
    return [_sum_of_bits(leaf, in_blocks) for leaf in leaves]


# Elements that are summed at a time: XLA:CPU keeps the products of a sum in memory, as large as what is summed.
_BLOCK = 1 << 20


def _sum_of_bits(x: jax.Array, in_blocks: bool = True) -> jax.Array:
    """Sum of the elements' bits, each times an odd number of its own, modulo 2^32.

    Integers add up to the same on every device layout, and no change of a single element escapes. `in_blocks`, for
    arrays on one device, takes no memory beside them; blocks of a sharded array would have to be gathered.
    """
    x = jnp.asarray(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    if not x.size:
        return jnp.zeros((), jnp.uint32)
    unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")

    def of_rows(rows: jax.Array, first: jax.Array | int) -> jax.Array:
        """The part of some rows of the last axis, the first of them number `first` of all."""
        bits = jax.lax.bitcast_convert_type(rows, unsigned).astype(jnp.uint32)
        index = jnp.asarray(first, jnp.uint32) + jax.lax.broadcasted_iota(jnp.uint32, rows.shape, 0)
        index = index * np.uint32(rows.shape[1]) + jax.lax.broadcasted_iota(jnp.uint32, rows.shape, 1)
        return jnp.sum(bits * (index * np.uint32(0x9E3779B2) + np.uint32(1)), dtype=jnp.uint32, axis=1)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        start = jnp.minimum(
            i * step, count - step
        )  # the last block begins earlier, and skips what was summed
        sums = of_rows(jax.lax.dynamic_slice_in_dim(rows, start, step), start)
        return total + jnp.sum(jnp.where(start + jnp.arange(step) >= i * step, sums, 0), dtype=jnp.uint32)

    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    count = rows.shape[0]
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    if not in_blocks or count <= step:
        return jnp.sum(of_rows(rows, 0), dtype=jnp.uint32)
    return jax.lax.fori_loop(0, -(-count // step), add, jnp.zeros((), jnp.uint32))


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Turn whatever goes wrong inside Orbax and below into one sentence."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    text = str(error)
    code = re.search(r"os_error_code='(\d+)'", text)
    number = error.errno if isinstance(error, OSError) else int(code[1]) if code else None
    if number == errno.ENOSPC or "No space left" in text:
        return "no space is left on the disk"
    if number:
        return os.strerror(number).lower()
    if "reading array" in text:
        return "an array cannot be read"
    line = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return line if len(line) <= 200 else line[:197] + "..."


def _what_is_there(directory: pathlib.Path) -> str:
    if not directory.exists():
        near = (
            sorted(p.parent.name for p in directory.parent.glob("*/steps"))
            if directory.parent.is_dir()
            else []
        )
        return "it does not exist" + (f"; beside it there are {', '.join(near)}" if near else "")
    return "it has no folder `steps`"


def _lock(directory: pathlib.Path) -> IO[str] | None:
    """Keep other processes from writing to `directory` while the file returned is open.

    The system drops the lock when the process ends, however it ends. On several hosts the first one holds it.
    """
    if fcntl is None or jax.process_index() != 0:
        return None
    file = open(directory / ".lock", "a+")  # noqa: SIM115 - it stays open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise CheckpointError(
            f"{directory} is being written to by another process (number {owner}): "
            "stop it, or name another directory"
        ) from None
    except OSError:
        return file  # a file system without locks
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


__all__ = [
    "AnotherModelError",
    "Blueprint",
    "CheckpointError",
    "Checkpoints",
    "Loaded",
    "Restored",
    "differences",
    "load_model",
    "model_trees",
    "read_description",
    "read_model_config",
    "read_tokenizer",
    "save_model",
    "write_description",
]
