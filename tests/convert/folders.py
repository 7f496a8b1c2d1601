"""Hugging Face folders made in the tests: golden models, a tokenizer of their size, FP8 weights."""

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import TensorSpec, deserialize, serialize_file

from mlaflax.tokenizer import Tokenizer
from tests.parity import golden

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def write_tensors(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """A .safetensors file, by the format's own library; its function for numpy knows neither bfloat16 nor FP8."""
    serialize_file(
        {
            name: TensorSpec(dtype=str(x.dtype), shape=x.shape, data_ptr=x.ctypes.data, data_len=x.nbytes)
            for name, x in tensors.items()
        },
        path,
    )


def write_folder(
    directory: pathlib.Path,
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    *,
    files: int = 1,
    tokenizer: bool = False,
) -> pathlib.Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = sorted(weights)
    weight_map = {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors" if files > 1 else "model.safetensors"
        part = {name: np.ascontiguousarray(weights[name]) for name in names[i::files]}
        write_tensors(directory / file, part)
        weight_map |= dict.fromkeys(part, file)
    if files > 1:
        index = {
            "metadata": {"total_size": sum(x.nbytes for x in weights.values())},
            "weight_map": weight_map,
        }
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    if tokenizer:
        write_tokenizer(directory)
    return directory


def write_tokenizer(directory: pathlib.Path, vocab_size: int = 300) -> None:
    """As published ones are: an end of text that only tokenizer_config.json tells, and a chat template."""
    trained = Tokenizer.train(["the cat sat on the mat, the dog ran under the tree. " * 8], vocab_size)
    (directory / "tokenizer.json").write_text(json.dumps(json.loads(trained.to_json()), indent=3))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|pad|>",
                "chat_template": TEMPLATE,
            }
        )
    )
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def golden_folder(directory: pathlib.Path, name: str, dtype: str = "float32", **options: Any) -> pathlib.Path:
    """A golden model; with a tokenizer, its vocabulary is 320 instead of 160."""
    file = golden.load(name)
    shapes, config = dict(file.shapes), dict(file.config)
    if options.get("tokenizer"):
        config |= {"vocab_size": 320, "eos_token_id": 257}
        for table in ("model.embed_tokens.weight", "lm_head.weight"):
            shapes[table] = (320, *shapes[table][1:])
    weights = golden.make_weights(shapes, file.seed)
    kept = "e_score_correction_bias"
    weights = {
        k: v if k.endswith(kept) else v.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
        for k, v in weights.items()
    }
    return write_folder(directory, config, weights, **options)


def to_fp8(weights: dict[str, np.ndarray], block: tuple[int, int]) -> dict[str, np.ndarray]:
    """The projections as e4m3 with a scale per block, as DeepSeek-V3 is published; the rest as it is."""
    out = {}
    for name, value in weights.items():
        if not name.endswith("_proj.weight") and "_proj_with_mqa" not in name:
            out[name] = value
            continue
        high, wide = block
        rows, columns = (-(-n // b) for n, b in zip(value.shape, block, strict=True))
        padded = np.zeros((rows * high, columns * wide), np.float32)
        padded[: value.shape[0], : value.shape[1]] = value
        blocks = padded.reshape(rows, high, columns, wide)
        scale = np.abs(blocks).max((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).reshape(padded.shape)[: value.shape[0], : value.shape[1]]
        out[name] = codes.astype(ml_dtypes.float8_e4m3fn)
        out[f"{name}_scale_inv"] = scale.astype(np.float32)
    return out


def read_folder(directory: pathlib.Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every tensor of a folder: dtype, shape and bytes, read by the format's own library."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, x in deserialize(file.read_bytes()):
            assert name not in found
            found[name] = (x["dtype"], list(x["shape"]), bytes(x["data"]))
    return found
