"""A Hugging Face model folder: config.json, weights in safetensors files, tokenizer files.

Opening it reads headers alone. Weights are read piece by piece out of mapped files, so a piece is all that a reader
needs to hold. Pickle files are never opened.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from mlaflax.config import ConfigError, require

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
# What belongs to a tokenizer or says how to generate: carried along as it is.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_SCALE = "_scale_inv"
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


class Tensor(NamedTuple):
    """Where a tensor lies: its file, its number format as safetensors spells it, its shape, its first byte."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class HFFolder:
    """The weights and files of one model.

    Attributes:
      path: the folder.
      config: what config.json says.
      tensors: every tensor by name, but for the scales of FP8 weights.

    Raises:
      ConfigError: no folder, no config.json, no safetensors files, one that is missing or damaged, or a name or link
        that leads out of the folder.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        require(self.path.is_dir(), "DIR", str(path), "no such folder; it must hold a Hugging Face model")
        # In the hub's own cache files are links from snapshots/REVISION to blobs/ of the same model.
        self._root = self.path.resolve()
        if self._root.parent.name == "snapshots":
            self._root = self._root.parent.parent
        self.config = self._json("config.json")
        self.tensors: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}
        for file, names in self._files().items():
            for name, tensor in _header(self._inside(file)).items():
                if names is not None and name not in names:
                    continue  # the index says where a tensor is to be taken from
                where = self._scales if name.endswith(_SCALE) else self.tensors
                where[name] = tensor
            for name in names or ():
                if name not in self.tensors and name not in self._scales:
                    raise ConfigError(f"{self.path / file} lacks {name}, which {INDEX} places there")
        self._block = self._fp8_block()

    def companions(self) -> dict[str, bytes]:
        """Contents of the tokenizer's files and of those that go with them."""
        return {n: self._inside(n).read_bytes() for n in COMPANIONS if (self.path / n).exists()}

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` of a tensor, its first axis, float32; scales of FP8 blocks applied.

        `start` must be a multiple of 128.

        Raises:
          ConfigError: a number format that is not known, or FP8 without its scales.
        """
        tensor = self.tensors[name]
        values = _map(tensor)[start:stop].astype(np.float32)
        if tensor.dtype != "F8_E4M3":
            return values
        scales = self._scales.get(name + _SCALE)
        if scales is None or len(tensor.shape) != 2:
            raise ConfigError(f"{name} is F8_E4M3: must be a matrix with scales {name}{_SCALE}")
        rows, columns = self._block
        expected = (math.ceil(tensor.shape[0] / rows), math.ceil(tensor.shape[1] / columns))
        if scales.shape != expected:
            raise ConfigError(
                f"{name}{_SCALE} has shape {scales.shape}: blocks of {self._block} make {expected}"
            )
        grid = _map(scales)[start // rows : math.ceil(stop / rows)].astype(np.float32)
        wide = np.repeat(grid, columns, axis=1)[:, : tensor.shape[1]]
        for i, row in enumerate(range(0, stop - start, rows)):
            values[row : row + rows] *= wide[i]
        return values

    def _fp8_block(self) -> tuple[int, int]:
        quantization = self.config.get("quantization_config")
        if not quantization:
            return 128, 128
        method = quantization.get("quant_method")
        require(method == "fp8", "quantization_config.quant_method", method, "must be 'fp8' or absent")
        block = tuple(quantization.get("weight_block_size") or ())
        require(block == (128, 128), "quantization_config.weight_block_size", block, "must be [128, 128]")
        return 128, 128

    def _files(self) -> dict[str, set[str] | None]:
        """Each weight file, and which of its tensors count: all where there is no index."""
        if (self.path / INDEX).exists():
            placed: Any = self._json(INDEX).get("weight_map")
            sound = isinstance(placed, dict) and all(isinstance(f, str) for f in placed.values())
            require(
                sound and bool(placed),
                f"{self.path / INDEX}: weight_map",
                placed,
                "must name a file per tensor",
            )
            files: dict[str, set[str] | None] = {}
            for name, file in placed.items():
                names = files.setdefault(file, set())
                assert names is not None
                names.add(name)
            return files
        if (self.path / WEIGHTS).exists():
            return {WEIGHTS: None}
        pickles = sorted(p.name for p in self.path.iterdir() if p.suffix in _PICKLES)
        if pickles:
            raise ConfigError(
                f"DIR = {str(self.path)!r}: holds pickle files ({', '.join(pickles[:3])}), which run code when they "
                "are opened; it must hold safetensors files"
            )
        raise ConfigError(f"DIR = {str(self.path)!r}: must hold {WEIGHTS}, or {INDEX} and the files it names")

    def _inside(self, name: str) -> pathlib.Path:
        """The file of that name, if it is one and lies in the folder."""
        file = self.path / name
        if pathlib.PurePath(name).name != name or not file.resolve().is_relative_to(self._root):
            raise ConfigError(f"{name!r} leads out of {self.path}: its files must lie in it")
        require(file.is_file(), "DIR", str(self.path), f"lacks {name}")
        return file

    def _json(self, name: str) -> dict[str, Any]:
        file = self._inside(name)
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{file}: must be JSON ({error})") from None
        require(isinstance(content, dict), str(file), type(content).__name__, "must hold one JSON object")
        return content


def _header(file: pathlib.Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="np"):  # checks the header against the length of the file
            pass
        with open(file, "rb") as content:
            size = int.from_bytes(content.read(8), "little")
            entries = json.loads(content.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{file}: must be a whole safetensors file ({error})") from None
    return {
        name: Tensor(file, entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def _map(tensor: Tensor) -> np.ndarray:
    if tensor.dtype not in _DTYPES:
        raise ConfigError(f"{tensor.file}: holds {tensor.dtype} weights; must be {', '.join(_DTYPES)}")
    if 0 in tensor.shape:
        return np.zeros(tensor.shape, _DTYPES[tensor.dtype])
    return np.memmap(tensor.file, _DTYPES[tensor.dtype], "r", tensor.offset, tensor.shape)


def names_in_brief(names: Iterable[str]) -> str:
    """The first five names and how many more there are."""
    every = sorted(names)
    more = f" and {len(every) - 5} more" if len(every) > 5 else ""
    return ", ".join(every[:5]) + more
