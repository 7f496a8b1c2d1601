"""Number formats of the latent cache: rounding, packing into bits, byte counts.

A token's cache entry is a latent of `c` dims and a rotated rope key of `r` dims. A format says which
arrays hold it (`parts`), how to write it (`pack`) and how to read it back (`unpack`). The training
graph simulates the cache with `simulate`, which is `unpack(pack(x))` with a straight-through
gradient: the very functions that the real cache uses, so both round alike.

Arrays of narrow floats are kept as unsigned bits: XLA:CPU updates them in place, and copies bfloat16
and float8 arrays instead.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from mlaflax.config import CacheFormat, require_choice

FP8_GROUP = 128
FP8_MAX = 448.0  # largest finite e4m3fn; a cast from above 464 gives NaN, so values are clamped first

Parts = dict[str, Array]


class Part(NamedTuple):
    """One array of a format: `size` entries of `dtype` per token.

    In a page of `t` tokens it is stored `[t, size]` when `token_major`, else `[size, t]`: latents are
    read as rows by both matrix products, rope and scales as columns by the first one only, and either
    way the minor dimension is a multiple of 128 at full-size shapes.
    """

    size: int
    dtype: np.dtype
    token_major: bool


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format of the cache.

    Attributes:
      name: as configurations and command lines spell it.
      parts: `(c, r) -> {part name: Part}`.
      pack: `(latent f32 [..., c], rope f32 [..., r]) -> {part name: [..., size]}`.
      unpack_latent: `{part: [..., size]} -> f32 [..., c]`.
      unpack_rope: the same for the rope key. It acts elementwise, so it takes either layout.
      exact: whether float32 values survive unchanged.
    """

    name: str
    parts: Callable[[int, int], dict[str, Part]]
    pack: Callable[[Array, Array], Parts]
    unpack_latent: Callable[[Mapping[str, Array]], Array]
    unpack_rope: Callable[[Array], Array]
    exact: bool = False

    def bytes_per_token(self, c: int, r: int) -> int:
        """Bytes of one token in one layer."""
        return sum(part.size * part.dtype.itemsize for part in self.parts(c, r).values())

    def simulate(
        self, latent: Float[Array, "... c"], rope: Float[Array, "... r"]
    ) -> tuple[Float[Array, "... c"], Float[Array, "... r"]]:
        """The values that the cache would hand back, in float32, with the gradient of the identity."""
        if self.exact:
            return latent.astype(jnp.float32), rope.astype(jnp.float32)
        return _round_trip(self.name, latent.astype(jnp.float32), rope.astype(jnp.float32))


@jax.custom_vjp
def _identity_gradient(x: Array, rounded: Array) -> Array:
    del x
    return rounded


# x + stop_gradient(rounded - x) would do, but its forward value is not `rounded` to the last bit.
_identity_gradient.defvjp(lambda x, rounded: (rounded, None), lambda _, g: (g, jnp.zeros_like(g)))


def _round_trip(name: str, latent: Array, rope: Array) -> tuple[Array, Array]:
    fmt = get_format(name)
    parts = fmt.pack(lax.stop_gradient(latent), lax.stop_gradient(rope))
    return (
        _identity_gradient(latent, fmt.unpack_latent(parts)),
        _identity_gradient(rope, fmt.unpack_rope(parts["rope"])),
    )


def to_bf16_bits(x: Float[Array, "..."]) -> Array:
    """Round float32 to bfloat16 (nearest, ties to even) and return the bits as uint16."""
    return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def from_bf16_bits(bits: Array) -> Float[Array, "..."]:
    # A shift and a bitcast: XLA:CPU converts bfloat16 more slowly than it computes on integers.
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def to_e4m3_bits(x: Float[Array, "..."]) -> Array:
    """Round float32 to float8 e4m3fn (nearest, ties to even), saturating at 448; bits as uint8."""
    clamped = jnp.clip(x, -FP8_MAX, FP8_MAX)
    return lax.bitcast_convert_type(clamped.astype(jnp.float8_e4m3fn), jnp.uint8)


def from_e4m3_bits(bits: Array) -> Float[Array, "..."]:
    """Exact float32 values of e4m3fn bits (finite ones: the cache never holds NaN).

    Integer arithmetic, without float32 subnormals, which XLA flushes: exponent and mantissa go to
    their float32 places as if every code were normal; a subnormal code m * 2^-9 then reads as
    2^-7 (1 + m/8), which 2 f - 2^-6 puts right.
    """
    wide = bits.astype(jnp.uint32)
    sign = (wide & 0x80) << 24
    magnitude = (wide & 0x7F) << 20
    value = lax.bitcast_convert_type(magnitude + jnp.uint32(120 << 23), jnp.float32)
    value = jnp.where(magnitude < (1 << 23), 2.0 * value - 2.0**-6, value)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, jnp.uint32) | sign, jnp.float32)


def _fp8_groups(c: int) -> int:
    return -(-c // FP8_GROUP)


def _grouped(x: Array) -> Array:
    """`[..., c]` -> `[..., groups, FP8_GROUP]`, the last group padded with zeros."""
    c = x.shape[-1]
    pad = _fp8_groups(c) * FP8_GROUP - c
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)]) if pad else x
    return x.reshape(*x.shape[:-1], -1, FP8_GROUP)


def _ungrouped(x: Array, c: int) -> Array:
    return x.reshape(*x.shape[:-2], -1)[..., :c]


def _fp8_pack(latent: Array, rope: Array) -> Parts:
    groups = _grouped(latent)
    largest = jnp.max(jnp.abs(groups), axis=-1)
    # The layout of DeepSeek's FlashMLA: one float32 scale per 128 dims, amax / 448.
    # A group that holds NaN or infinity has such a scale, and reads back as NaN: no code says NaN.
    scale = jnp.where(largest == 0, 1.0, largest / FP8_MAX)
    scale = jnp.where(jnp.isinf(largest), jnp.nan, scale)
    codes = to_e4m3_bits(_ungrouped(groups / scale[..., None], latent.shape[-1]))
    return {"latent": codes, "scale": scale, "rope": to_bf16_bits(rope)}


def _fp8_unpack_latent(parts: Mapping[str, Array]) -> Array:
    codes = parts["latent"]
    values = _grouped(from_e4m3_bits(codes)) * parts["scale"][..., None]
    return _ungrouped(values, codes.shape[-1])


def _part(size: int, dtype: type, token_major: bool) -> Part:
    return Part(size, np.dtype(dtype), token_major)


def _plain_parts(dtype: type) -> Callable[[int, int], dict[str, Part]]:
    return lambda c, r: {"latent": _part(c, dtype, True), "rope": _part(r, dtype, False)}


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format(
            name="f32",
            parts=_plain_parts(np.float32),
            pack=lambda latent, rope: {"latent": latent, "rope": rope},
            unpack_latent=lambda parts: parts["latent"],
            unpack_rope=lambda rope: rope,
            exact=True,
        ),
        Format(
            name="bf16",
            parts=_plain_parts(np.uint16),
            pack=lambda latent, rope: {"latent": to_bf16_bits(latent), "rope": to_bf16_bits(rope)},
            unpack_latent=lambda parts: from_bf16_bits(parts["latent"]),
            unpack_rope=from_bf16_bits,
        ),
        Format(
            name="fp8",
            parts=lambda c, r: {
                "latent": _part(c, np.uint8, True),
                "scale": _part(_fp8_groups(c), np.float32, False),
                "rope": _part(r, np.uint16, False),
            },
            pack=_fp8_pack,
            unpack_latent=_fp8_unpack_latent,
            unpack_rope=from_bf16_bits,
        ),
    )
}


def get_format(name: str) -> Format:
    """The format of that name; `ConfigError` lists the known ones."""
    require_choice("cache_format", name, CacheFormat)
    return FORMATS[name]
