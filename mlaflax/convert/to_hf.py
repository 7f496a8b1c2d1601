"""Turn a checkpoint into a Hugging Face folder that transformers loads as DeepSeek-V2 or V3.

DIR gets config.json, .safetensors files with their index, and the tokenizer's files and chat template.

Weights are float32 in the checkpoint. By default each tensor is written in the number format that it had in the folder
the checkpoint was converted from (so that converting there and back changes no bit), float32 for FP8 and for a
model that was trained here. --dtype bfloat16 rounds to half the size; the bias that selects experts stays float32.

DIR appears when it is complete or not at all.

python -m mlaflax.convert to-hf runs/v2-lite v2-lite-hf
"""

import collections
import dataclasses
import json
import pathlib
import re
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from mlaflax.checkpoint import load_model, model_trees
from mlaflax.cli import Terminal
from mlaflax.config import ConfigError, require, require_choice
from mlaflax.convert import origin
from mlaflax.convert.from_hf import count_parameters, mesh_over
from mlaflax.convert.hf_writer import FORMATS, write_tensors
from mlaflax.convert.layout import flatten
from mlaflax.convert.tensors import HFTensor, family_of, tensors_to_hf
from mlaflax.files import new_folder, require_new, write_whole

WrittenDtype = Literal["source", "float32", "bfloat16"]
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to convert, and where to.

    Attributes:
      checkpoint: directory of a checkpoint, converted or trained.
      out: folder to make; must not exist, or be empty.
      step: training step of the checkpoint.
      dtype: number format of the weights; "source" is the one they came in.
      max_shard_size: largest .safetensors file, such as 500MB or 5GB; a larger tensor has a file of its own.
      devices: spread the weights over this many devices while converting.
      json: print one JSON object on stdout in place of the summary.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CKPT")]
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    step: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the newest)")] = (
        None
    )
    dtype: WrittenDtype = "source"
    max_shard_size: str = "5GB"
    devices: int = 1
    json: bool = False

    def __post_init__(self):
        require_choice("dtype", self.dtype, WrittenDtype)
        size_in_bytes(self.max_shard_size)


def size_in_bytes(text: str) -> int:
    """The number in "5GB", "500MB" or "1000".

    Raises:
      ConfigError: it is not such a size, or 0.
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) *([KMGT]?B?)", text.strip(), re.IGNORECASE)
    unit = (
        _UNITS.get(found[2].upper().removesuffix("B") + "B" if found[2] not in ("", "B", "b") else "")
        if found
        else None
    )
    size = int(float(found[1]) * unit) if found and unit else 0
    require(size > 0, "max_shard_size", text, "must be a size above 0 such as 500MB or 5GB")
    return size


def run(arguments: Arguments, terminal: Terminal) -> int:
    began = time.monotonic()
    source, out = pathlib.Path(arguments.checkpoint), pathlib.Path(arguments.out)
    require_new(out, "DIR")
    mesh = mesh_over(arguments.devices)
    found = origin.read_origin(source)
    with terminal.working(f"loading {source}"):
        loaded = load_model(source, arguments.step, mesh)
    config = loaded.config
    hf_config = family_of(config).model_config_to_hf(config)
    tree = model_trees(loaded.model)
    flat = flatten(tree["params"]) | {
        k: v for k, v in flatten(tree["state"]).items() if k.endswith("moe.bias")
    }
    tensors = list(tensors_to_hf(flat, config))
    dtype_of = _dtypes(arguments.dtype, found)
    if arguments.dtype == "source":
        tensors = [_exactly(tensor, dtype_of(tensor.name)) for tensor in tensors]
    hf_config["dtype"] = collections.Counter(dtype_of(t.name) for t in tensors).most_common(1)[0][0]
    hf_config |= found["config"] if found else _token_ids(loaded.tokenizer)
    carried = [source / name for name in origin.TOKENIZER_FILES if (source / name).is_file()]
    if loaded.tokenizer is not None:
        origin.checked_tokenizer(source, config.vocab_size)
    with new_folder(out, "DIR") as unfinished:
        write_whole(unfinished / "config.json", json.dumps(hf_config, indent=2) + "\n")
        with terminal.progress(f"writing {out}", len(tensors)) as done:
            size = write_tensors(unfinished, tensors, dtype_of, size_in_bytes(arguments.max_shard_size), done)
        origin.copy_files(carried, unfinished)
        if loaded.tokenizer is not None and not (source / "tokenizer_config.json").exists():
            origin.describe_tokenizer(unfinished, loaded.tokenizer, config.max_length)
        names = sorted(path.name for path in unfinished.iterdir())
    summary: dict[str, Any] = {
        "status": "done",
        "folder": str(out),
        "architecture": hf_config["architectures"][0],
        "step": loaded.step,
        "parameters": count_parameters(config),
        "tensors": len(tensors),
        "dtypes": dict(collections.Counter(dtype_of(t.name) for t in tensors)),
        "bytes_written": size,
        "files": names,
        "seconds": round(time.monotonic() - began, 2),
        "tokenizer": loaded.tokenizer is not None,
        "left_out": ["codebooks of nuq4"] if loaded.model.codebooks() is not None else [],
    }
    if arguments.json:
        print(json.dumps(summary), flush=True)
    else:
        print(_say(summary), flush=True)
    return 0


def _dtypes(wanted: WrittenDtype, found: dict[str, Any] | None) -> Callable[[str], str]:
    if wanted == "source":
        usual, others = (found["dtype"], found["other_dtypes"]) if found else ("float32", {})
        return lambda name: others.get(name, usual)
    # transformers keeps this one in float32, too: bfloat16 would move experts across their thresholds.
    return lambda name: "float32" if name.endswith("e_score_correction_bias") else wanted


def _exactly(tensor: HFTensor, dtype: str) -> HFTensor:
    """The same tensor, refused when it is read if `dtype` cannot hold it: training may have gone on since."""

    def read() -> np.ndarray:
        values = tensor.read()
        if not np.array_equal(values.astype(FORMATS[dtype][1]).astype(np.float32), values, equal_nan=True):
            raise ConfigError(
                f"{tensor.name} was {dtype} in the folder it came from and no longer fits that: "
                "say --dtype float32 to keep every bit, or --dtype bfloat16 to round"
            )
        return values

    return tensor if dtype == "float32" else tensor._replace(read=read)


def _token_ids(tokenizer: Any) -> dict[str, int]:
    if tokenizer is None:
        return {}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    return {name: value for name, value in ids.items() if value is not None}


def _say(summary: dict[str, Any]) -> str:
    dtypes = ", ".join(f"{count:,} in {dtype}" for dtype, count in summary["dtypes"].items())
    lines = [
        f"{summary['parameters']:,} parameters of step {summary['step']} as {summary['architecture']}, "
        f"{summary['tensors']:,} tensors ({dtypes}), {summary['bytes_written'] / 1e9:.3f} GB written, "
        f"{summary['seconds']:.1f} s: {summary['folder']}",
        f"files: {', '.join(summary['files']) if len(summary['files']) < 12 else len(summary['files'])}",
    ]
    if summary["left_out"]:
        lines.append(f"left out: {', '.join(summary['left_out'])} (transformers rounds no cache)")
    if not summary["tokenizer"]:
        lines.append("the checkpoint holds no tokenizer.json, so the folder has none")
    return "\n".join(lines)
