"""Writes tensors as safetensors files of limited size with their index, one tensor in memory at a time."""

import json
import math
import os
import pathlib
import struct
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from mlaflax.config import require
from mlaflax.convert.hf_folder import INDEX
from mlaflax.convert.tensors import HFTensor

# Number formats that are written: their name in the files, and in numpy.
FORMATS = {
    "float32": ("F32", np.dtype(np.float32)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "float16": ("F16", np.dtype(np.float16)),
}


def shards(
    tensors: Sequence[HFTensor], dtype_of: Callable[[str], str], max_bytes: int
) -> list[list[HFTensor]]:
    """The tensors file by file, in order, no file above `max_bytes` unless a single tensor is."""
    files: list[list[HFTensor]] = [[]]
    held = 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * FORMATS[dtype_of(tensor.name)][1].itemsize
        if files[-1] and held + size > max_bytes:
            files.append([])
            held = 0
        files[-1].append(tensor)
        held += size
    return files


def write_tensors(
    directory: pathlib.Path,
    tensors: Sequence[HFTensor],
    dtype_of: Callable[[str], str],
    max_bytes: int,
    done: Callable[[str], None] = lambda name: None,
) -> int:
    """Write `model.safetensors`, or `model-00001-of-000NN.safetensors` and their index; return the bytes of weights.

    Args:
      dtype_of: number format of a tensor, by name: a key of `FORMATS`.
      max_bytes: of a file's tensors; a larger tensor has a file of its own.
      done: called with the name of each tensor that is written.

    Raises:
      ConfigError: `max_bytes` is not positive.
      OSError: the disk is full, for one.
    """
    require(max_bytes > 0, "max_shard_size", max_bytes, "must be above 0 bytes")
    files = shards(tensors, dtype_of, max_bytes)
    total, weight_map = 0, {}
    for number, held in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        total += _write_file(directory / name, held, dtype_of, done)
        weight_map |= {tensor.name: name for tensor in held}
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def _write_file(
    path: pathlib.Path,
    tensors: Sequence[HFTensor],
    dtype_of: Callable[[str], str],
    done: Callable[[str], None],
) -> int:
    # The format's own library wants all tensors of a file in memory; the format is a header and their bytes. Wide
    # numbers first, so that each begins at a multiple of its size.
    tensors = sorted(tensors, key=lambda t: -FORMATS[dtype_of(t.name)][1].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    for tensor in tensors:
        name, dtype = FORMATS[dtype_of(tensor.name)]
        start, end = end, end + math.prod(tensor.shape) * dtype.itemsize
        header[tensor.name] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            values = np.ascontiguousarray(tensor.read(), FORMATS[dtype_of(tensor.name)][1])
            file.write(values.reshape(-1).view(np.uint8).data)
            done(tensor.name)
        file.flush()
        os.fsync(file.fileno())
    return end
