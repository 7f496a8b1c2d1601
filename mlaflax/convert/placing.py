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
    held: dict[Bounds, dict[Device, jax.Array]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        local = tuple(stop - start for start, stop in bounds)
        held.setdefault(bounds, {})[device] = _zeros(local, device)
    for piece in pieces:
        for bounds, buffers in held.items():
            _fill(buffers, bounds, piece, read_rows, chunk_bytes)
        done(piece.name)
    buffers = [buffer for group in held.values() for buffer in group.values()]
    return jax.make_array_from_single_device_arrays(shape, sharding, buffers)


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
        for device, buffer in buffers.items():
            moved = jax.device_put(block, device)
            place_at = np.asarray((*at, start - first), np.int32)
            buffers[device] = _update(buffer, moved, place_at, len(piece.rows) if piece.transposed else 0)
        # One chunk at a time: updates that wait would keep theirs.
        jax.block_until_ready(list(buffers.values()))


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _update(buffer: jax.Array, block: jax.Array, at: jax.Array, rows_last: int) -> jax.Array:
    """`block` into `buffer` at `at`: its leading axes, then the first axis of rows.

    `rows_last` above 0 is the number of the block's axes that go behind the others.
    """
    order = (*range(rows_last, block.ndim), *range(rows_last))
    block = jnp.transpose(block, order).astype(buffer.dtype)
    lead = buffer.ndim - block.ndim
    starts = [jnp.zeros((), jnp.int32)] * buffer.ndim
    starts[:lead] = [at[i] for i in range(lead)]
    starts[lead + (block.ndim - rows_last if rows_last else 0)] = at[lead]
    return jax.lax.dynamic_update_slice(buffer, block[(None,) * lead], starts)


def _zeros(shape: tuple[int, ...], device: Device) -> jax.Array:
    # Under jit: it is born there, not copied there.
    return jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=SingleDeviceSharding(device))()
