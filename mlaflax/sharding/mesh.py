"""The device mesh: one set of axis names for every program."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from mlaflax.config import ConfigError, require

# data: batch, weights replicated. fsdp: batch, weights sharded. expert: batch, experts sharded.
# tensor: heads and hidden widths. context: positions of one sequence, pages of its cache.
MESH_AXES = ("data", "fsdp", "expert", "tensor", "context")


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    tensor: int = 1,
    context: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh over `devices` (default: all) with the axes `MESH_AXES`, in that order.

    One axis may be -1: it takes the devices that the others leave. Axes are `Auto`: the partitioner
    chooses the shardings of intermediate values.

    Raises:
      ConfigError: a size is not positive, more than one is -1, or the sizes do not multiply to the number of
        devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes: dict[str, int] = dict(zip(MESH_AXES, (data, fsdp, expert, tensor, context), strict=True))
    for name, size in sizes.items():
        require(
            size > 0 or size == -1,
            f"mesh.{name}",
            size,
            "must be at least 1, or -1 for the devices left over",
        )
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ConfigError(
            f"mesh: {' and '.join(free)} are both -1; only one axis can take the devices left over"
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and len(devices) % fixed == 0:
        sizes[free[0]] = len(devices) // fixed
    if math.prod(sizes.values()) != len(devices):
        shape = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(f"mesh {shape}: does not multiply to the {len(devices)} devices present")
    return jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices
    )
