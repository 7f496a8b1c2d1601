"""Parameters put together in the memory of their devices, piece by piece.

Every device's shard of a parameter is made there, of zeros, and updated in place. The host holds one piece at a time,
however large the parameter is.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding


class Filling:
    """One parameter on the way.

    Args:
      shape: global.
      dtype: of the parameter.
      sharding: where it goes; this process fills the shards of its own devices.
    """

    def __init__(self, shape: Sequence[int], dtype: jnp.dtype, sharding: jax.sharding.Sharding):
        self.shape, self.dtype, self.sharding = tuple(shape), dtype, sharding
        self._bounds, self._shards = {}, {}
        for device, index in sharding.addressable_devices_indices_map(self.shape).items():
            bounds = [s.indices(n)[:2] for s, n in zip(index or (), self.shape, strict=True)]
            self._bounds[device] = bounds
            with jax.default_device(device):
                zeros = jnp.zeros([b - a for a, b in bounds], dtype)
            self._shards[device] = jax.device_put(zeros, SingleDeviceSharding(device))

    def put(self, start: Sequence[int], piece: np.ndarray) -> None:
        """Write `piece` from `start` on, both with as many axes as the parameter."""
        for device, bounds in self._bounds.items():
            inside, at = [], []
            for first, size, (low, high) in zip(start, piece.shape, bounds, strict=True):
                a, b = max(first, low), min(first + size, high)
                if a >= b:
                    break
                inside.append(slice(a - first, b - first))
                at.append(a - low)
            else:
                part = jax.device_put(piece[tuple(inside)].astype(self.dtype), SingleDeviceSharding(device))
                # In place: waiting lets the host drop the piece before it reads the next one.
                self._shards[device] = jax.block_until_ready(
                    _update(self._shards[device], part, np.array(at, np.int32))
                )

    def finish(self) -> jax.Array:
        """The parameter, as it is by now."""
        return jax.make_array_from_single_device_arrays(
            self.shape, self.sharding, list(self._shards.values())
        )


@functools.partial(jax.jit, donate_argnums=0)
def _update(shard: jax.Array, part: jax.Array, at: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(shard, part, list(at))
