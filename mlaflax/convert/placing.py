"""Fills parameters on their devices from tensors on disk, a few megabytes of host memory at a time.

A parameter that is stacked over layers and experts is allocated once on each device that holds a part of it and
filled in place (the update's buffer is donated), so that neither the host nor the device ever holds it twice.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from mlaflax.convert.layout import Piece

# Of float32 numbers on their way, in bytes: large enough for the disk, small beside any model.
CHUNK_BYTES = 16 << 20

Device = Any
Bounds = tuple[tuple[int, int], ...]
ReadRows = Callable[[str, int, int], np.ndarray]


def place(
    shape: tuple[int, ...],
    sharding: Sharding,
    pieces: Sequence[Piece],
    read_rows: ReadRows,
    *,
    done: Callable[[str], None] = lambda name: None,
    chunk_bytes: int = CHUNK_BYTES,
) -> jax.Array:
    """A float32 parameter of `shape`, with the contents of `pieces` and 0 elsewhere.

    Args:
      sharding: where it goes; each process reads and fills what its own devices hold.
      read_rows: `(name, start, stop)` gives these rows of a tensor, in any number format.
      done: called with the name of each tensor that is in place.
    """
    held: dict[Bounds, dict[Device, Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple((s.indices(n)[0], s.indices(n)[1]) for s, n in zip(index or (), shape, strict=True))
        held.setdefault(bounds, {})[device] = None
    for bounds, buffers in held.items():
        local = tuple(stop - start for start, stop in bounds)
        # What is no larger than a chunk is put together on the host: a program for each shape costs more.
        small = 4 * math.prod(local) <= chunk_bytes
        first = np.zeros(local, np.float32) if small else None
        buffers.update({device: first if small else _zeros(local, device) for device in buffers})
    for piece in pieces:
        for bounds, buffers in held.items():
            _fill(buffers, bounds, piece, read_rows, chunk_bytes)
        done(piece.name)
    arrays = [jax.device_put(buffer, device) for group in held.values() for device, buffer in group.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _fill(
    buffers: dict[Device, jax.Array],
    bounds: Bounds,
    piece: Piece,
    read_rows: ReadRows,
    chunk_bytes: int,
) -> None:
    """Update the buffers, equal on all their devices, with what `piece` has between `bounds`."""
    lead = len(piece.index)
    if not all(a <= i < b for i, (a, b) in zip(piece.index, bounds[:lead], strict=True)):
        return
    at = tuple(i - a for i, (a, _) in zip(piece.index, bounds[:lead], strict=True))
    inner = bounds[lead:]
    width = len(piece.columns)
    rows, columns = (inner[width:], inner[:width]) if piece.transposed else (
        inner[: len(piece.rows)],
        inner[len(piece.rows) :],
    )  # fmt: skip
    (first, last), *others = rows
    if piece.part is not None:
        others[0] = (piece.part[0] + others[0][0], piece.part[0] + others[0][1])
    cut = tuple(slice(a, b) for a, b in (*others, *columns))
    each = math.prod(piece.rows[1:])  # rows of theirs in one of ours
    step = max(1, chunk_bytes // (4 * each * max(1, math.prod(piece.columns))))
    for start in range(first, last, step):
        stop = min(start + step, last)
        block = read_rows(piece.name, start * each, stop * each)
        block = block.reshape(stop - start, *piece.rows[1:], *piece.columns)
        block = np.ascontiguousarray(block[(slice(None), *cut)])
        where = (*at, *([0] * (width if piece.transposed else 0)), start - first)
        on_host = next(iter(buffers.values()))
        if isinstance(on_host, np.ndarray):
            block = block.transpose(_order(block.ndim, len(piece.rows) if piece.transposed else 0))
            ends = (slice(a, a + n) for a, n in zip(where[lead:], block.shape, strict=False))
            on_host[(*at, *ends)] = block
            continue
        for device, buffer in buffers.items():
            moved = jax.device_put(block, device)
            starts = np.zeros(buffer.ndim, np.int32)
            starts[: len(where)] = where
            buffers[device] = _update(buffer, moved, starts, len(piece.rows) if piece.transposed else 0)
        # One chunk at a time: updates that wait would keep theirs.
        jax.block_until_ready(list(buffers.values()))


def _order(axes: int, rows: int) -> tuple[int, ...]:
    """The axes with the first `rows` of them behind the others."""
    return (*range(rows, axes), *range(rows))


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _update(buffer: jax.Array, block: jax.Array, starts: jax.Array, rows_last: int) -> jax.Array:
    """`block`, its first `rows_last` axes moved behind the others, into `buffer` from `starts` on."""
    block = jnp.transpose(block, _order(block.ndim, rows_last)).astype(buffer.dtype)
    block = block[(None,) * (buffer.ndim - block.ndim)]
    return jax.lax.dynamic_update_slice(buffer, block, [starts[i] for i in range(buffer.ndim)])


def _zeros(shape: tuple[int, ...], device: Device) -> jax.Array:
    # Under jit: it is born there, not copied there.
    return jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=SingleDeviceSharding(device))()
