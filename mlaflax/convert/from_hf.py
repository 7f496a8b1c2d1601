"""Turn a Hugging Face folder into a checkpoint.

DIR holds config.json, .safetensors files (with their index, if they are several) and tokenizer files. config.json
alone decides what the model is: DeepSeek V2, V2-Lite, V3, R1, Moonlight, Kimi-K2 and whatever else has their layout;
Llama, SmolLM2, Mistral, Qwen2 and Qwen3, with an ordinary cache of keys and values.
OUT becomes a checkpoint for python -m infer and for --checkpoint.initial of python -m train.

Weights are stored as float32: 4 bytes a parameter, exact for float32, bfloat16 and float16. FP8 weights with a scale
per block are multiplied by their scales, in float32. Prediction modules (MTP) are left out. Memory: the float32
weights on the devices, and a few megabytes more.

Everything is checked before anything is written, and OUT appears when it is complete or not at all.

python -m mlaflax.convert from-hf DeepSeek-V2-Lite runs/v2-lite
"""

import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import tyro
from jax.sharding import Mesh

from mlaflax.checkpoint import Blueprint, CheckpointError, save_model
from mlaflax.cli import CannotDo, Terminal
from mlaflax.config import ConfigError, Dtype, ModelConfig, require, require_choice
from mlaflax.convert import origin
from mlaflax.convert.hf_folder import HFFolder, abbreviated, check_tensors
from mlaflax.convert.layout import left_out_of, nest
from mlaflax.convert.placing import CHUNK_BYTES, place
from mlaflax.convert.tensors import model_config_from_hf, pieces
from mlaflax.files import new_folder, require_new
from mlaflax.model.transformer import Transformer
from mlaflax.sharding import make_mesh

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to convert, and where to.

    Attributes:
      source: folder of the model: config.json, .safetensors files, tokenizer files.
      out: checkpoint to make; must not exist, or be empty.
      dtype: of activations and matrix products when the checkpoint is used (weights are float32 either way); bfloat16
        is what accelerators want, float32 is faster on CPU and exact.
      devices: spread the weights over this many devices while converting; the checkpoint opens on any number.
      json: print one JSON object on stdout in place of the summary.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    dtype: Dtype = "float32"
    devices: int = 1
    json: bool = False

    def __post_init__(self):
        require_choice("dtype", self.dtype, Dtype)


def run(arguments: Arguments, terminal: Terminal) -> int:
    began = time.monotonic()
    out = pathlib.Path(arguments.out)
    require_new(out, "OUT")
    mesh = mesh_over(arguments.devices)
    folder, config = open_folder(arguments.source)
    config = dataclasses.replace(config, dtype=arguments.dtype)
    tokenizer = origin.checked_tokenizer(folder.directory, config.vocab_size)
    carried = origin.carried_files(folder)
    ignored = left_out_of(folder.tensors, config.num_layers)
    with new_folder(out, "OUT") as unfinished:
        wanted = list(_expected(config))
        with terminal.progress(f"reading {folder.directory}", len(wanted)) as done:
            model = read_model(folder, config, mesh, done)
        try:
            with terminal.working(f"writing {out}"):
                save_model(unfinished, model)
        except CheckpointError as error:
            raise CannotDo(str(error).replace(str(unfinished), str(out))) from error
        origin.copy_files(carried, unfinished)
        origin.write_origin(
            unfinished,
            folder.config,
            {name: folder.stored_dtype(name) for name in wanted if name in folder.tensors},
        )
        written = sum(p.stat().st_size for p in unfinished.rglob("*") if p.is_file())
    scaled = sum(folder.tensors[name].dtype == "F8_E4M3" for name in wanted if name in folder.tensors)
    summary: dict[str, Any] = {
        "status": "done",
        "checkpoint": str(out),
        "parameters": count_parameters(config),
        "tensors": len(wanted),
        "files": len(folder.files),
        "bytes_read": sum(
            math.prod(t.shape) * _WIDTH[t.dtype] for t in folder.tensors.values() if t.dtype in _WIDTH
        ),
        "bytes_written": written,
        "seconds": round(time.monotonic() - began, 2),
        "dequantised_tensors": scaled,
        "tokenizer": tokenizer is not None,
        "carried": [path.name for path in carried],
        "left_out": sorted(ignored),
    }
    if arguments.json:
        print(json.dumps(summary), flush=True)
    else:
        print(_say(summary, ignored), flush=True)
    return 0


_WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}


def open_folder(directory: str | pathlib.Path) -> tuple[HFFolder, ModelConfig]:
    """A folder whose tensors are exactly those of its configuration.

    Raises:
      ConfigError: with everything that is wrong.
    """
    folder = HFFolder(directory)
    where = folder.directory / "config.json"
    try:
        config = model_config_from_hf(folder.config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}".replace("config.json: config.json ", "config.json ")) from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{where} holds a value of the wrong type: {error}") from None
    ignored = left_out_of(folder.tensors, config.num_layers)
    if config.tie_embeddings and HEAD in folder.tensors:
        ignored = {**ignored, HEAD: "the embedding again"}
    check_tensors(folder, _expected(config), ignored)
    if config.tie_embeddings and HEAD in folder.tensors:
        _require_tied(folder)
    return folder, config


def read_model(
    folder: HFFolder,
    config: ModelConfig,
    mesh: Mesh | None = None,
    done: Callable[[str], None] = lambda name: None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Transformer:
    """The model of a folder, as `open_folder` returns it, read straight onto its devices.

    Args:
      mesh: where the parameters go; default: the first local device.
      done: called with the name of each tensor that is in place.
    """
    blueprint = Blueprint(config, mesh)
    filled = pieces(config)
    last = {piece.name: ours for ours, list_ in filled.items() for piece in list_}

    def trees(tree: Any, prefix: str = "") -> dict[str, jax.Array]:
        flat = {}
        for key, value in tree.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                flat |= trees(value, f"{name}.")
            else:
                # A tensor that fills two parameters is done with the second.
                said = lambda theirs, ours=name: done(theirs) if last[theirs] == ours else None  # noqa: E731
                flat[name] = place(
                    value.shape, value.sharding, filled[name], folder.rows, done=said, chunk_bytes=chunk_bytes
                )
        return flat

    return blueprint.build(**{kind: nest(trees(tree)) for kind, tree in blueprint.shapes.items()})


def mesh_over(devices: int) -> Mesh | None:
    """A mesh that shards every parameter over this many devices; None for one.

    Raises:
      ConfigError: there are not so many.
    """
    there = jax.devices()
    require(
        1 <= devices <= len(there), "devices", devices, f"must lie between 1 and the {len(there)} present"
    )
    return make_mesh(fsdp=devices, devices=there[:devices]) if devices > 1 else None


def count_parameters(config: ModelConfig) -> int:
    """Numbers in the model's arrays, expert biases included."""
    shapes = Blueprint(config).shapes
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def _expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {piece.name: piece.shape for list_ in pieces(config).values() for piece in list_}


def _require_tied(folder: HFFolder) -> None:
    """Some files repeat a tied head; one that differs would be lost silently."""
    shape = folder.tensors[EMBED].shape
    step = max(1, CHUNK_BYTES // (4 * shape[1]))
    same = folder.tensors[HEAD].shape == shape and all(
        (
            folder.rows(HEAD, i, min(i + step, shape[0])) == folder.rows(EMBED, i, min(i + step, shape[0]))
        ).all()
        for i in range(0, shape[0], step)
    )
    if not same:
        raise ConfigError(
            f"{folder.tensors[HEAD].file}: {HEAD} differs from the embedding, but tie_word_embeddings is true"
        )


def _say(summary: dict[str, Any], ignored: dict[str, str]) -> str:
    lines = [
        f"{summary['parameters']:,} parameters from {summary['tensors']:,} tensors in {summary['files']} file(s), "
        f"{summary['bytes_read'] / 1e9:.3f} GB read, {summary['bytes_written'] / 1e9:.3f} GB written, "
        f"{summary['seconds']:.1f} s: {summary['checkpoint']}"
    ]
    if summary["dequantised_tensors"]:
        lines.append(f"multiplied by their scales: {summary['dequantised_tensors']:,} FP8 tensors")
    for reason in sorted(set(ignored.values())):
        names = [name for name, why in ignored.items() if why == reason]
        lines.append(f"left out ({reason}): {abbreviated(names)}")
    if summary["carried"]:
        lines.append(f"carried along: {', '.join(summary['carried'])}")
    if not summary["tokenizer"]:
        lines.append("no tokenizer.json: python -m infer can use the checkpoint once one lies in it")
    return "\n".join(lines)
