"""Reads a folder of Hugging Face: config.json, and the tensors of its safetensors files, rows at a time.

Everything is checked before a weight is read: headers, the index, that no file is missing or cut short, that none
lies outside the folder. Nothing that could run code (pickles) is opened.
"""

import json
import math
import os
import pathlib
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from mlaflax.config import ConfigError, require

INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SCALE = "_scale_inv"
# Of the format, as the files name them, and in numpy.
_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}
PLAIN = ("F64", "F32", "F16", "BF16")


class TensorInFile(NamedTuple):
    """Where a tensor lies: `dtype` as the format names it, `start` in bytes from the beginning of `file`."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int


class HFFolder:
    """A model's folder: `config`, and where each of its `tensors` lies.

    `block` is the size of the blocks that have a scale each, (0, 0) where the weights are not in FP8.

    Raises:
      ConfigError: no such folder, a file that is missing, damaged, a pickle or outside the folder, or weights in a
        number format that is not supported.
    """

    def __init__(self, directory: str | os.PathLike):
        self.directory = pathlib.Path(directory)
        require(
            self.directory.is_dir(),
            "DIR",
            str(directory),
            "must be a folder with config.json and safetensors",
        )
        self.config = read_json(self.inside("config.json"), "the model's configuration")
        self.files = [self.inside(name) for name in self._file_names()]
        self.tensors: dict[str, TensorInFile] = {}
        for file in self.files:
            for name, tensor in read_header(file).items():
                if name in self.tensors:
                    raise ConfigError(
                        f"{file} and {self.tensors[name].file.name} both hold {name}: which one counts is unknown"
                    )
                self.tensors[name] = tensor
        self._check_index()
        self.block = self._fp8_block()

    def inside(self, name: str) -> pathlib.Path:
        """The path of a file of this folder; a link is followed only within it, or into the cache of the hub."""
        if not name or pathlib.PurePath(name).name != name or "\\" in name or "\0" in name:
            raise ConfigError(f"{self.directory}: {name!r} must be the name of a file in this folder")
        path, root = self.directory / name, self.directory.resolve()
        allowed = [root]
        if root.parent.name == "snapshots":  # the hub's cache: snapshots/REVISION/name -> ../../blobs/HASH
            allowed.append(root.parent.parent / "blobs")
        target = path.resolve()
        if not any(target.is_relative_to(folder) for folder in allowed):
            raise ConfigError(f"{path} is a link to {target}, outside {root}: links must stay in the folder")
        return path

    def _file_names(self) -> list[str]:
        if (self.directory / INDEX).exists():
            names = sorted(set(self._weight_map().values()))
            for name in names:
                if not name.endswith(".safetensors"):
                    raise ConfigError(
                        f"{self.directory / INDEX}: {name!r} must be a .safetensors file, the only kind that is read"
                    )
            missing = [name for name in names if not self.inside(name).is_file()]
            if missing:
                raise ConfigError(
                    f"{self.directory} lacks {_some(missing)}, which {INDEX} names: "
                    f"{len(missing)} of {len(names)} files"
                )
            return names
        if (self.directory / "model.safetensors").exists():
            return ["model.safetensors"]
        names = sorted(p.name for p in self.directory.iterdir() if p.name.endswith(".safetensors"))
        if names:
            return names
        pickles = sorted(p.name for p in self.directory.iterdir() if p.name.endswith(_PICKLES))
        if pickles:
            raise ConfigError(
                f"{self.directory} holds its weights as pickles only ({_some(pickles)}), which can run any code "
                "when they are opened: only .safetensors files are read; convert it first where you trust it"
            )
        raise ConfigError(f"{self.directory} holds no .safetensors file")

    def _weight_map(self) -> dict[str, str]:
        path = self.inside(INDEX)
        found = read_json(path, "the index of the weight files").get("weight_map")
        if not isinstance(found, dict) or not found or not all(isinstance(v, str) for v in found.values()):
            raise ConfigError(f"{path}: weight_map must name a file for each tensor")
        return found

    def _check_index(self) -> None:
        if not (self.directory / INDEX).exists():
            return
        named = self._weight_map()
        wrong = sorted(n for n, file in named.items() if self._file_of(n) != file)
        if wrong:
            where = self._file_of(wrong[0])
            where = f"it is in {where}" if where else "it is in none of the files"
            raise ConfigError(
                f"{self.directory / INDEX} says that {wrong[0]} is in {named[wrong[0]]}, but {where}"
                + (f" ({len(wrong) - 1} more are wrong)" if len(wrong) > 1 else "")
            )

    def _file_of(self, name: str) -> str | None:
        return self.tensors[name].file.name if name in self.tensors else None

    def _fp8_block(self) -> tuple[int, int]:
        quantization = self.config.get("quantization_config")
        if quantization is None:
            return 0, 0
        where = f"{self.directory / 'config.json'}: quantization_config"
        require(isinstance(quantization, dict), where, quantization, "must be an object")
        method = quantization.get("quant_method")
        require(
            method == "fp8",
            f"{where}.quant_method",
            method,
            "must be 'fp8' with a scale per block, or absent",
        )
        block = quantization.get("weight_block_size")
        good = isinstance(block, list) and len(block) == 2 and all(type(x) is int and x > 0 for x in block)
        require(
            good,
            f"{where}.weight_block_size",
            block,
            "must be two positive whole numbers, such as [128, 128]",
        )
        return block[0], block[1]

    def scale_name(self, name: str) -> str | None:
        """The tensor with the scales of the FP8 tensor `name`; None for one in another format."""
        return name + SCALE if self.tensors[name].dtype == "F8_E4M3" else None

    def stored_dtype(self, name: str) -> str:
        """What a copy of `name` must be to hold all its bits: "float32", "bfloat16" or "float16"."""
        return {"BF16": "bfloat16", "F16": "float16"}.get(self.tensors[name].dtype, "float32")

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` of a tensor (its first axis), FP8 times its scales in float32.

        Raises:
          ConfigError: the file has become shorter since it was opened.
        """
        values = _read(self.tensors[name], name, start, stop)
        scales_of = self.scale_name(name)
        if scales_of is None:
            return values
        high, wide = self.block
        scales = _read(self.tensors[scales_of], scales_of, start // high, -(-stop // high)).astype(np.float32)
        scales = np.repeat(scales, wide, axis=1)[:, : values.shape[1]]
        out = values.astype(np.float32)
        for i, row in enumerate(scales):
            first = (start // high + i) * high - start
            out[max(first, 0) : max(first + high, 0)] *= row
        return out


def read_json(path: pathlib.Path, what: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ConfigError: it is missing, unreadable or no JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: {what} must be there") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: it must hold JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is damaged: it must hold a JSON object")
    return found


def read_header(file: pathlib.Path) -> dict[str, TensorInFile]:
    """The tensors of a safetensors file, whose header and length the format's own library has checked.

    Raises:
      ConfigError: the file is damaged or cannot be read.
    """
    try:
        # The library gives no offsets and, in numpy, no FP8; but it knows best what a valid file is.
        with safe_open(file, "numpy"):
            pass
        with open(file, "rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
    except SafetensorError as error:
        raise ConfigError(f"{file} is damaged or cut short: {error}") from None
    except (OSError, ValueError, struct.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{file} cannot be read: {reason.lower()}") from None
    header.pop("__metadata__", None)
    return {
        name: TensorInFile(file, x["dtype"], tuple(x["shape"]), 8 + length + x["data_offsets"][0])
        for name, x in header.items()
    }


def _read(tensor: TensorInFile, name: str, start: int, stop: int) -> np.ndarray:
    dtype = np.dtype(_DTYPES[tensor.dtype])
    row = math.prod(tensor.shape[1:])
    count = (stop - start) * row
    # Not mapped: a file that is cut short meanwhile would end the process.
    values = np.fromfile(tensor.file, dtype, count, offset=tensor.start + start * row * dtype.itemsize)
    if values.size != count:
        raise ConfigError(f"{tensor.file} was cut short while {name} was read")
    return values.reshape(stop - start, *tensor.shape[1:])


def abbreviated(names: Iterable[str], limit: int = 8) -> str:
    """All of `names` in few words: those that differ in numbers only as one, `layers.{3-60}.experts.{0-255}.x`.

    Numbers in braces stand for every combination of them; where a combination is missing, the count says so.
    """
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in sorted(names):
        template = re.sub(r"\d+", "{}", name.replace("{", "{{").replace("}", "}}"))
        groups.setdefault(template, []).append(tuple(map(int, re.findall(r"\d+", name))))
    said = []
    for template, numbers in groups.items():
        columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        text = template.format(*(_ranges(c) if len(c) > 1 else c[0] for c in columns))
        whole = len(numbers) == math.prod(map(len, columns))
        said.append(text if whole else f"{text} ({len(numbers)} of these)")
    more = f" and {len(said) - limit} more kinds" if len(said) > limit else ""
    return ", ".join(said[:limit]) + more


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    said = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return "{" + ",".join(said if len(said) <= 6 else [*said[:5], "..."]) + "}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_tensors(
    folder: HFFolder, expected: Mapping[str, tuple[int, ...]], ignored: Mapping[str, str]
) -> None:
    """Compare what a folder holds with names and shapes that it must hold.

    Args:
      expected: shape by name.
      ignored: names that may be there, and are left out.

    Raises:
      ConfigError: with all that is missing, unknown, misshapen or of an unknown number format, in one sentence.
    """
    tensors, wrong = folder.tensors, []
    if missing := set(expected) - set(tensors):
        wrong.append(f"{len(missing)} tensors are missing: {abbreviated(missing)}")
    scales = {s for name in expected if name in tensors and (s := folder.scale_name(name))}
    extra = {n for n in set(tensors) - set(expected) - set(ignored) - scales if math.prod(tensors[n].shape)}
    if extra:
        wrong.append(f"{len(extra)} tensors are unknown to the configuration: {abbreviated(extra)}")
    for name in sorted(set(expected) & set(tensors)):
        wrong += _problems(folder, name, expected[name])
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ConfigError(f"{folder.directory}: {'; '.join(wrong[:8])}{more}")


def _problems(folder: HFFolder, name: str, shape: tuple[int, ...]) -> list[str]:
    tensor, scale_name = folder.tensors[name], folder.scale_name(name)
    if tensor.shape != shape:
        return [f"{name} has shape {list(tensor.shape)}, {list(shape)} by config.json"]
    if scale_name is None:
        if tensor.dtype in PLAIN:
            return []
        return [f"{name} is {tensor.dtype}, which must be one of {', '.join(_DTYPES)}"]
    if not folder.block[0] or len(shape) != 2:
        return [f"{name} is F8_E4M3, but config.json has no quantization_config with blocks of a matrix"]
    if scale_name not in folder.tensors:
        return [f"{name} is F8_E4M3, but its scales {scale_name} are missing"]
    scale = folder.tensors[scale_name]
    blocks = tuple(-(-size // block) for size, block in zip(shape, folder.block, strict=True))
    if scale.shape != blocks or scale.dtype not in PLAIN:
        return [
            f"{scale_name} is {scale.dtype} of shape {list(scale.shape)}, which must be F32 of {list(blocks)}: "
            f"a scale for each {folder.block[0]}x{folder.block[1]} block"
        ]
    return []
