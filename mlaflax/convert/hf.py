"""Hugging Face folders in and out: whole models, tensor by tensor.

    from_hf("DeepSeek-V2-Lite", "runs/v2_lite")       # then load_model("runs/v2_lite"), infer, train
    to_hf("runs/v2_lite", "exported")                 # then AutoModelForCausalLM.from_pretrained("exported")

config.json decides what a model is; its name decides nothing.
"""

import itertools
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from mlaflax.checkpoint import Blueprint, CheckpointError, load_model, model_trees
from mlaflax.config import AttentionConfig, ConfigError, ModelConfig, require
from mlaflax.convert import deepseek, llama
from mlaflax.convert.filling import Filling
from mlaflax.convert.hf_folder import COMPANIONS, INDEX, WEIGHTS, HFFolder
from mlaflax.convert.layout import nest
from mlaflax.convert.slots import Slot, compare_names, slots, theirs_of
from mlaflax.convert.write import require_absent, write_model
from mlaflax.tokenizer import Tokenizer

# Bytes of float32 read at a time: small beside a tensor of a model of any size, large beside the cost of a call.
PIECE = 16 << 20
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}

Advance = Callable[[str], None]


class Converted(NamedTuple):
    """What was converted: number of parameters, and the names of tensors left out on purpose."""

    parameters: int
    left_out: list[str]


def model_config_from_hf(config: dict[str, Any]) -> ModelConfig:
    """The model that a config.json describes, of whichever family.

    Raises:
      ConfigError: an architecture, a key or a value that is not supported.
    """
    named = [*(config.get("architectures") or ()), config.get("model_type")]
    for family in (deepseek, llama):
        if any(name in family.ARCHITECTURES or name in family.ARCHITECTURES.values() for name in named):
            return family.model_config_from_hf(config)
    known = ", ".join([*deepseek.ARCHITECTURES, *llama.ARCHITECTURES])
    raise ConfigError(f"architectures = {config.get('architectures')!r}: must be one of {known}")


class Import:
    """A folder that was opened and found to be whole; `run` reads its weights.

    Args:
      path: the folder.
      mesh: where the parameters go; default: the first local device.

    Raises:
      ConfigError: the folder, its configuration, its tensors or its tokenizer are not what they must be.
    """

    def __init__(self, path: str | os.PathLike, mesh: Mesh | None = None):
        self.folder = HFFolder(path)
        self.config = model_config_from_hf(self.folder.config)
        self.slots = slots(self.config)
        shapes = {name: tensor.shape for name, tensor in self.folder.tensors.items()}
        self.left_out = compare_names(shapes, self.slots, self.config)
        self.companions = self.folder.companions()
        self.tokenizer = self._tokenizer()
        self._blueprint = Blueprint(self.config, mesh)

    def _tokenizer(self) -> Tokenizer | None:
        if "tokenizer.json" not in self.companions:
            return None
        tokenizer = Tokenizer.load(self.folder.path)
        require(
            tokenizer.vocab_size <= self.config.vocab_size,
            "tokenizer.json: entries",
            tokenizer.vocab_size,
            f"must not exceed the {self.config.vocab_size} rows of the embedding",
        )
        return tokenizer

    @property
    def steps(self) -> int:
        """How often `run` tells of a tensor read."""
        return len({slot.theirs for slot in self.slots})

    def run(self, advance: Advance = lambda _: None) -> Any:
        """The model, its parameters where the mesh says."""
        shapes = self._blueprint.shapes
        flat = dict(flatten_shapes(shapes["params"]))
        states = dict(flatten_shapes(shapes["state"]))
        filled = {}
        for ours, of_ours in itertools.groupby(sorted(self.slots, key=_order), key=lambda slot: slot.ours):
            shape = flat[ours] if ours in flat else states[ours]
            filling = Filling(shape.shape, shape.dtype, shape.sharding)
            for slot in of_ours:
                self._read(slot, filling)
                if slot.part is None or slot.part.start:
                    advance(slot.theirs)
            filled[ours] = filling.finish()
        if self.config.tie_embeddings and "lm_head.weight" in self.folder.tensors:
            self._require_tied()
        for name, shape in {**flat, **states}.items():
            if name not in filled:  # a bias that V2 does not have, codebooks
                filled[name] = Filling(shape.shape, shape.dtype, shape.sharding).finish()
        return self._blueprint.build(
            nest({name: filled[name] for name in flat}), nest({name: filled[name] for name in states})
        )

    def _read(self, slot: Slot, filling: Filling) -> None:
        rows, width = slot.rule.their_shape[0], int(np.prod(slot.rule.their_shape[1:]))
        for first, last in _pieces(rows, 4 * width, slot.rows):
            value = slot.unfold(self.folder.rows(slot.theirs, first, last))
            start = [*slot.index, *([0] * len(slot.shape))]
            start[len(slot.index) + slot.axis] = first // slot.rows
            filling.put(start, value.reshape(*([1] * len(slot.index)), *value.shape))

    def _require_tied(self) -> None:
        head, embed = "lm_head.weight", "model.embed_tokens.weight"
        shape = self.folder.tensors[embed].shape
        for first, last in _pieces(shape[0], 4 * shape[1], 1):
            same = self.folder.tensors[head].shape == shape and np.array_equal(
                self.folder.rows(head, first, last), self.folder.rows(embed, first, last)
            )
            if not same:
                raise ConfigError(f"{head} differs from the embedding, but tie_word_embeddings is true")


def _order(slot: Slot) -> tuple[str, tuple[int, ...]]:
    return slot.ours, slot.index


def _pieces(rows: int, row_bytes: int, multiple: int) -> Iterator[tuple[int, int]]:
    """Cut `rows` into pieces of about `PIECE` bytes: whole multiples, and whole blocks of 128 for scales."""
    step = int(np.lcm(multiple, 128))
    size = max(1, PIECE // max(1, step * row_bytes)) * step
    for first in range(0, rows, size):
        yield first, min(rows, first + size)


def flatten_shapes(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts with their names joined by dots."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten_shapes(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def from_hf(
    path: str | os.PathLike,
    out: str | os.PathLike,
    *,
    mesh: Mesh | None = None,
    advance: Advance = lambda _: None,
) -> Converted:
    """Write the model in a Hugging Face folder as a checkpoint of step 0, which `load_model` opens.

    Weights become float32, those in FP8 with the scales of their blocks applied; the tokenizer's files, the chat
    template among them, are carried along. Prediction modules (multi-token prediction) are left out and named.

    Args:
      path: the folder.
      out: directory to write; it appears whole or not at all.
      mesh: where the parameters go on the way; default: the first local device.
      advance: told of every tensor read.

    Raises:
      ConfigError: a folder that is not what it must be; nothing is written.
      CheckpointError: `out` exists, or cannot be written.
    """
    require_absent(out)
    return write_import(Import(path, mesh), out, advance)


def write_import(source: Import, out: str | os.PathLike, advance: Advance = lambda _: None) -> Converted:
    """Read the weights of an opened folder and write them as `from_hf` does."""
    model = source.run(advance)
    write_model(out, source.config, model, source.tokenizer, source.companions)
    return Converted(_count(model), source.left_out)


def to_hf(
    checkpoint: str | os.PathLike,
    out: str | os.PathLike,
    *,
    step: int | None = None,
    dtype: str = "float32",
    shard_bytes: int = 5 << 30,
    advance: Callable[[str, int], None] = lambda name, total: None,
) -> Converted:
    """Write a checkpoint as a Hugging Face folder, which transformers loads.

    Args:
      checkpoint: directory of a training run, or what `from_hf` wrote.
      out: folder to write; it appears whole or not at all.
      step: default: the newest.
      dtype: of the weights, one of `DTYPES`.
      shard_bytes: the largest file, unless a single tensor is larger.
      advance: told of every tensor written, and how many there are.

    Raises:
      ConfigError: a model that no family of transformers can express, or an argument that is not allowed.
      CheckpointError: the checkpoint cannot be read, `out` exists or cannot be written.
    """
    require(dtype in DTYPES, "dtype", dtype, f"must be one of {', '.join(DTYPES)}")
    require(shard_bytes > 0, "shard_bytes", shard_bytes, "must be greater than 0")
    require_absent(out)
    model, tokenizer, config, _ = load_model(checkpoint, step)
    family = deepseek if isinstance(config.attention, AttentionConfig) else llama
    description = family.model_config_to_hf(config) | {"dtype": dtype}
    target = pathlib.Path(out).absolute()
    beside = pathlib.Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        _write_weights(beside, model, config, DTYPES[dtype], shard_bytes, advance)
        (beside / "config.json").write_text(json.dumps(description, indent=2) + "\n")
        for name in COMPANIONS:
            if (pathlib.Path(checkpoint) / name).exists():
                shutil.copyfile(pathlib.Path(checkpoint) / name, beside / name)
        if tokenizer is not None and not (beside / "tokenizer_config.json").exists():
            eos = tokenizer.decode([tokenizer.eos_id], skip_special=False)
            written = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
            (beside / "tokenizer_config.json").write_text(json.dumps(written, indent=2) + "\n")
        os.chmod(beside, 0o755)
        os.rename(beside, target)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {(error.strerror or str(error)).lower()}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Converted(_count(model), [])


def _count(model: Any) -> int:
    return sum(leaf.size for _, leaf in flatten_shapes(model_trees(model)["params"]))


def flatten_arrays(model: Any) -> dict[str, Any]:
    """A model's parameters and state by our names joined by dots."""
    trees = model_trees(model)
    return {name: leaf for tree in (trees["params"], trees["state"]) for name, leaf in flatten_shapes(tree)}


def _write_weights(
    folder: pathlib.Path, model: Any, config: ModelConfig, dtype: Any, shard_bytes: int, advance: Any
) -> None:
    params = flatten_arrays(model)
    bias = params.get("moe_layers.moe.bias")
    if (
        isinstance(config.attention, AttentionConfig)
        and deepseek.is_v2(config)
        and bias is not None
        and bias.any()
    ):
        raise ConfigError("moe_layers.moe.bias is not 0, and DeepSeek-V2 has no selection bias")
    places: dict[str, list[Slot]] = {}
    for slot in slots(config):
        places.setdefault(slot.theirs, []).append(slot)
    empty = deepseek.empty_tensors(config) if isinstance(config.attention, AttentionConfig) else {}
    shards: list[list[str]] = [[]]
    held = 0
    for name, of_name in places.items():
        size = int(np.prod(of_name[0].rule.their_shape)) * np.dtype(dtype).itemsize
        if held and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    placed, total = {}, 0
    for i, names in enumerate(shards):
        file = WEIGHTS if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name in names:
            tensors[name] = theirs_of(places[name], params).astype(dtype)
            advance(name, len(places))
        if i == 0:
            tensors |= {name: np.zeros(shape, dtype) for name, shape in empty.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(tensors, file)
        total += sum(t.nbytes for t in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
