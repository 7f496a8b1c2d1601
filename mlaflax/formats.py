"""Number formats of the latent cache: rounding, packing into bits, byte counts.

A token's cache entry is a latent of `c` dims and a rotated rope key of `r` dims. A format says which
arrays hold it (`parts`), how to write it (`pack`) and how to read it back (`unpack_latent`,
`unpack_rope`). The training graph simulates the cache with `simulate`, which is unpack(pack(x)) with a
straight-through gradient: the very functions that the real cache uses, so both round alike.

    f32, bf16   as they are, and rounded
    fp8         e4m3 codes, one float32 scale per 128 dims
    int8        codes from -127 to 127, one bfloat16 scale per 32 dims
    fp4         e2m1 codes, two in a byte, one e4m3 scale per 16 dims, chosen by squared error
    nuq4        the same with a codebook of 16 levels of one's own on a smooth curve, one per layer, in e2m1's place

The rope key is bfloat16 beside all but f32, or, where asked for, e4m3 codes with one float32 scale.

Arrays of narrow floats are kept as unsigned bits: XLA:CPU updates them in place, and copies bfloat16
and float8 arrays instead.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from mlaflax.config import require, require_cache_format

FP8_GROUP = 128
FP8_MAX = 448.0  # largest finite e4m3fn; a cast from above 464 gives NaN, so values are clamped first
INT8_GROUP = 32
_E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_MAX = _E2M1_LEVELS[-1]
E2M1_UNIT = 2.0**-14  # what e2m1's 1 is with its exponent in float16's place
BLOCK = 16  # dims that share a scale in the 4-bit formats
CODEBOOK_SIZE = 16

# Scales of the 4-bit formats are e4m3 numbers times 2^-5, from 2^-14 to 14. RMS-normalised latents do not
# exceed sqrt(c), so no scale above 14 is needed up to c = 7056 with e2m1's 6 as largest magnitude, up to 1482 with
# the Gaussian codebook's 2.75. What remains of e4m3's range is better spent at the bottom, and no second scale per
# token is needed.
SCALE_UNIT = 2.0**-5
_SCALE_NAN = 0x7F

# Scales that are tried: steps, in e4m3 numbers, from the one that just covers the block's largest value.
# e4m3 has 8 numbers to an octave, so 4 or 5 steps are a factor of 1.5, which makes 4 the code of the largest value.
# Squared error on Gaussian latents, relative: the covering scale alone 9.0e-3, with 1.5 times it 7.7e-3, these
# 6.7e-3, all there are 6.6e-3.
_FP4_STEPS = (-1, 0, 1, 2, 3, 4, 5)
# For a codebook the covering scale alone gives 5.9e-3, these 5.0e-3, all there are the same.
_NUQ4_STEPS = (-2, -1, 0, 1, 2)

# Levels of a codebook lie on a polynomial over the codes, which is read with a few multiplications where a table of
# free levels takes a tree of selections, more than the scale and the unpacking together. Free levels lose 0.1 % less.
LEVEL_DEGREE = 5
LEVEL_CODES = np.linspace(-1, 1, CODEBOOK_SIZE)
_FROM_LEVELS = np.linalg.pinv(np.vander(LEVEL_CODES, LEVEL_DEGREE + 1)).astype(np.float32)

# Levels for Gaussian latents under the scales that `nuq4` chooses: what `fit_codebook` finds, made symmetric.
_GAUSSIAN_POLYNOMIAL = np.polynomial.Polynomial([0, 1.953, 0, 0.674, 0, 0.123])
GAUSSIAN_CODEBOOK = _GAUSSIAN_POLYNOMIAL(LEVEL_CODES).astype(np.float32)

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
class RopeFormat:
    """A number format of the rope key.

    Attributes:
      parts: `r -> {part name: Part}`.
      pack: `rope f32 [..., r] -> {part name: [..., size]}`.
      unpack: back to f32. It acts along no axis, so it takes parts `[..., size]` or `[..., size, t]`.
    """

    parts: Callable[[int], dict[str, Part]]
    pack: Callable[[Array], Parts]
    unpack: Callable[[Mapping[str, Array]], Array]


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format of the cache.

    Attributes:
      name: as configurations and command lines spell it.
      latent_parts: `c -> {part name: Part}`, of the latent alone.
      pack_latent: `(latent f32 [..., c], codebook f32 [16] or None) -> {part name: [..., size]}`.
      unpack_latent: `{part: [..., size]} -> f32 [..., c]`; with a codebook, "codebook" is one of the parts.
      rope: how the rope key is held.
      dims_per_entry: latent dims in one entry of the part `latent`.
      codebook: whether it needs a codebook, float32 `[16]`, to write and to read.
      exact: whether float32 values survive unchanged.
    """

    name: str
    latent_parts: Callable[[int], dict[str, Part]]
    pack_latent: Callable[[Array, Array | None], Parts]
    unpack_latent: Callable[[Mapping[str, Array]], Array]
    rope: RopeFormat
    dims_per_entry: int = 1
    codebook: bool = False
    exact: bool = False

    def parts(self, c: int, r: int) -> dict[str, Part]:
        """The arrays that are kept of each token.

        Raises:
          ConfigError: the format cannot hold latents of `c` dims.
        """
        return {**self.latent_parts(c), **self.rope.parts(r)}

    def names(self, c: int, r: int) -> set[str]:
        """What a mapping to read from holds: the parts and, where the format needs one, "codebook"."""
        return {*self.parts(c, r), *(("codebook",) if self.codebook else ())}

    def latent_dims(self, parts: Mapping[str, Array]) -> int:
        """The latent's dims `c`, from its parts in any layout."""
        return parts["latent"].shape[-1] * self.dims_per_entry

    def pack(
        self,
        latent: Float[Array, "... c"],
        rope: Float[Array, "... r"],
        codebook: Float[Array, "16"] | None = None,
    ) -> Parts:
        """The parts of these tokens, `[..., size]` each; `codebook` is for formats that need one."""
        if self.codebook and codebook is None:
            raise ValueError(f"codebook = None: format {self.name} needs one")
        return {**self.pack_latent(latent, codebook), **self.rope.pack(rope)}

    def unpack_rope(self, parts: Mapping[str, Array]) -> Array:
        """The rope key from parts `[..., size]` or `[..., size, t]`, float32 in the same layout."""
        return self.rope.unpack(parts)

    def bytes_per_token(self, c: int, r: int) -> int:
        """Bytes of one token in one layer."""
        return sum(part.size * part.dtype.itemsize for part in self.parts(c, r).values())

    def simulate(
        self,
        latent: Float[Array, "... c"],
        rope: Float[Array, "... r"],
        codebook: Float[Array, "16"] | None = None,
    ) -> tuple[Float[Array, "... c"], Float[Array, "... r"]]:
        """The values that the cache would hand back, in float32, with the gradient of the identity.

        A format that needs a codebook takes `GAUSSIAN_CODEBOOK` where none is given.
        """
        latent, rope = latent.astype(jnp.float32), rope.astype(jnp.float32)
        if self.exact:
            return latent, rope
        parts = {}
        if self.codebook:
            codebook = jnp.asarray(GAUSSIAN_CODEBOOK) if codebook is None else lax.stop_gradient(codebook)
            parts["codebook"] = codebook
        parts |= self.pack(lax.stop_gradient(latent), lax.stop_gradient(rope), codebook)
        return (
            _identity_gradient(latent, self.unpack_latent(parts)),
            _identity_gradient(rope, self.unpack_rope(parts)),
        )


@jax.custom_vjp
def _identity_gradient(x: Array, rounded: Array) -> Array:
    del x
    return rounded


# x + stop_gradient(rounded - x) would do, but its forward value is not `rounded` to the last bit.
_identity_gradient.defvjp(lambda x, rounded: (rounded, None), lambda _, g: (g, jnp.zeros_like(g)))


# --- Bits ----------------------------------------------------------------------------------------------------


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


def _from_half_bits(bits: Array) -> Float[Array, "..."]:
    """Float32 values of float16 bits as uint16.

    float16 has room for the narrower floats: their exponents and mantissas, subnormal ones too, are float16's after a
    shift, times a power of two. One instruction of a CPU makes float32 of it; no float32 is subnormal on the way,
    which XLA would flush.
    """
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def from_e4m3_bits(bits: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Exact float32 values of e4m3fn bits (finite ones: the cache holds no NaN but as scales)."""
    wide = bits.astype(jnp.uint16)
    return _from_half_bits((wide & 0x7F) << 7 | (wide & 0x80) << 8) * 2.0**8


def _e2m1_passed(magnitude: Array) -> Iterator[Array]:
    """For each code from 1 on, whether a magnitude rounds to its level or above (ties to even codes)."""
    for code in range(1, len(_E2M1_LEVELS)):
        middle = (_E2M1_LEVELS[code - 1] + _E2M1_LEVELS[code]) / 2
        yield magnitude > middle if code % 2 else magnitude >= middle


def round_to_e2m1(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The nearest e2m1 number (ties to even), saturating at 6."""
    magnitude = jnp.abs(x)
    value = jnp.zeros_like(magnitude)
    for level, passed in zip(_E2M1_LEVELS[1:], _e2m1_passed(magnitude), strict=True):
        value = jnp.where(passed, level, value)
    return jnp.where(x < 0, -value, value)


def to_e2m1_codes(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Round float32 to float4 e2m1fn (nearest, ties to even), saturating at 6; codes from 0 to 15."""
    sign = (lax.bitcast_convert_type(x, jnp.uint32) >> 31 << 3).astype(jnp.uint8)
    passed = (p.astype(jnp.uint8) for p in _e2m1_passed(jnp.abs(x)))
    return functools.reduce(jnp.add, passed) | sign


def from_e2m1_codes(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """The values of e2m1fn codes from 0 to 15, times `E2M1_UNIT`."""
    wide = codes.astype(jnp.uint16)
    return _from_half_bits((wide & 7) << 9 | (wide & 8) << 12)


def pack_nibbles(codes: UInt8[Array, "... c"]) -> UInt8[Array, "... c/2"]:
    """Two 4-bit codes in a byte: the low nibbles are the first half of the dims, the high ones the second.

    Not neighbours side by side: each half is then read in order, with one shift for all of it.
    """
    low, high = jnp.split(codes, 2, axis=-1)
    return low | high << 4


def unpack_nibbles(packed: UInt8[Array, "... c/2"]) -> UInt8[Array, "... c"]:
    return jnp.concatenate([packed & 0xF, packed >> 4], axis=-1)


# --- Blocks and their scales ---------------------------------------------------------------------------------


def _groups(c: int, size: int) -> int:
    return -(-c // size)


def _grouped(x: Array, size: int) -> Array:
    """`[..., c]` -> `[..., groups, size]`, the last group padded with zeros."""
    c = x.shape[-1]
    pad = _groups(c, size) * size - c
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)]) if pad else x
    return x.reshape(*x.shape[:-1], _groups(c, size), size)


def _ungrouped(x: Array, c: int) -> Array:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])[..., :c]


def _largest(groups: Array) -> Array:
    """Largest magnitude of each group; NaN where a group holds NaN or infinity, which no code can say.

    As a scale it makes the whole group read back as NaN.
    """
    largest = jnp.max(jnp.abs(groups), axis=-1)
    return jnp.where(jnp.isinf(largest), jnp.nan, largest)


def scale_values(bits: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Float32 values of the 4-bit formats' scales."""
    return jnp.where(bits == _SCALE_NAN, jnp.nan, from_e4m3_bits(bits) * SCALE_UNIT)


def _reciprocal(scale: Array) -> Array:
    return jnp.where(scale == 0, 0.0, 1 / jnp.where(scale == 0, 1.0, scale))


def _choose_scales(
    blocks: Float[Array, "... 16"],
    reach: float | Array,
    steps: Sequence[int],
    nearest: Callable[[Array], Array],
) -> tuple[UInt8[Array, "..."], Float[Array, "... 16"]]:
    """Each block's scale with the least squared error, as bits, and the block divided by it.

    0 is among the scales tried for a block that is nearly all below the smallest scale. Blocks of zeros get
    it, and read back as zeros whatever the levels are.

    Args:
      reach: the largest magnitude that a code stands for.
      steps: the scales to try, counted in e4m3 numbers from the one that brings the largest value to `reach`.
      nearest: rounds divided values to what codes stand for.
    """
    largest = _largest(blocks)
    limit = reach * FP8_MAX * SCALE_UNIT
    blocks = jnp.clip(blocks, -limit, limit)  # squares of what no scale covers could overflow
    covering = to_e4m3_bits(jnp.minimum(largest, limit) / (reach * SCALE_UNIT)).astype(jnp.int32)
    # All scales at once, along an axis of their own: one after another they make a program several times as long.
    tried = jnp.clip(covering[..., None] + np.array(steps, np.int32), 0, _SCALE_NAN - 1)
    scale = scale_values(tried)[..., None]
    beside = blocks[..., None, :]
    error = jnp.sum(jnp.square(nearest(beside * _reciprocal(scale)) * scale - beside), axis=-1)
    best = jnp.take_along_axis(tried, jnp.argmin(error, axis=-1, keepdims=True), axis=-1)[..., 0]
    scaled = blocks * _reciprocal(scale_values(best))[..., None]
    return jnp.where(jnp.isnan(largest), _SCALE_NAN, best).astype(jnp.uint8), scaled


# --- The formats ---------------------------------------------------------------------------------------------


def _part(size: int, dtype: type, token_major: bool) -> Part:
    return Part(size, np.dtype(dtype), token_major)


def _e4m3_pack(groups: Array) -> tuple[Array, Array]:
    """e4m3 codes of each group and its float32 scale, amax / 448."""
    largest = _largest(groups)
    scale = jnp.where(largest == 0, 1.0, largest / FP8_MAX)
    return to_e4m3_bits(groups / scale[..., None]), scale


def _fp8_pack(latent: Array, codebook: Array | None) -> Parts:
    # The layout of DeepSeek's FlashMLA: one float32 scale per 128 dims.
    codes, scale = _e4m3_pack(_grouped(latent, FP8_GROUP))
    return {"latent": _ungrouped(codes, latent.shape[-1]), "scale": scale}


def _fp8_unpack(parts: Mapping[str, Array]) -> Array:
    codes = parts["latent"]
    values = _grouped(from_e4m3_bits(codes), FP8_GROUP) * parts["scale"][..., None]
    return _ungrouped(values, codes.shape[-1])


def _int8_pack(latent: Array, codebook: Array | None) -> Parts:
    groups = _grouped(latent, INT8_GROUP)
    bits = to_bf16_bits(_largest(groups) / 127)
    scale = from_bf16_bits(bits)[..., None]
    codes = jnp.clip(jnp.round(groups * _reciprocal(scale)), -127, 127)
    codes = jnp.where(jnp.isnan(codes), 0.0, codes).astype(jnp.int8)
    return {"latent": _ungrouped(codes, latent.shape[-1]), "scale": bits}


def _int8_unpack(parts: Mapping[str, Array]) -> Array:
    codes = parts["latent"]
    values = _grouped(codes.astype(jnp.float32), INT8_GROUP) * from_bf16_bits(parts["scale"])[..., None]
    return _ungrouped(values, codes.shape[-1])


def _four_bit_parts(name: str) -> Callable[[int], dict[str, Part]]:
    def parts(c: int) -> dict[str, Part]:
        require_halves(name, c)
        return {"latent": _part(c // 2, np.uint8, True), "scale": _part(c // BLOCK, np.uint8, False)}

    return parts


def require_halves(name: str, c: int) -> None:
    """Raise `ConfigError` unless a 4-bit format can hold latents of `c` dims."""
    allowed = f"must be a multiple of {2 * BLOCK} for cache_format = {name!r}, two halves of whole blocks"
    require(c % (2 * BLOCK) == 0, "attention.kv_lora_rank", c, allowed)


def _fp4_pack(latent: Array, codebook: Array | None) -> Parts:
    require_halves("fp4", latent.shape[-1])
    bits, scaled = _choose_scales(_grouped(latent, BLOCK), FP4_MAX, _FP4_STEPS, round_to_e2m1)
    return {"latent": pack_nibbles(to_e2m1_codes(scaled).reshape(latent.shape)), "scale": bits}


def _fp4_unpack(parts: Mapping[str, Array]) -> Array:
    values = from_e2m1_codes(unpack_nibbles(parts["latent"]))
    scale = scale_values(parts["scale"]) / E2M1_UNIT
    return _ungrouped(_grouped(values, BLOCK) * scale[..., None], values.shape[-1])


def nearest_level(x: Float[Array, "..."], codebook: Float[Array, "16"]) -> Float[Array, "..."]:
    """The level of an ascending codebook that is nearest to each value, the lower of two."""
    value = jnp.broadcast_to(codebook[0], x.shape)
    for i in range(1, CODEBOOK_SIZE):
        value = jnp.where(x > (codebook[i - 1] + codebook[i]) / 2, codebook[i], value)
    return value


def nearest_code(x: Float[Array, "..."], codebook: Float[Array, "16"]) -> UInt8[Array, "..."]:
    """The number of that level."""
    middles = list((codebook[1:] + codebook[:-1]) / 2)
    return functools.reduce(jnp.add, ((x > middle).astype(jnp.uint8) for middle in middles))


def level_values(codes: UInt8[Array, "..."], codebook: Float[Array, "16"]) -> Float[Array, "..."]:
    """The levels of these codes, which must lie on a polynomial of degree `LEVEL_DEGREE`."""
    x = codes.astype(jnp.float32) * (2 / (CODEBOOK_SIZE - 1)) - 1
    # Not a matrix product: some backends multiply matrices in bfloat16.
    first, *rest = jnp.sum(_FROM_LEVELS * codebook, axis=-1)
    return functools.reduce(lambda value, coefficient: value * x + coefficient, rest, first)


def codebook_codes(
    latent: Float[Array, "... c"], codebook: Float[Array, "16"]
) -> tuple[UInt8[Array, "... c"], UInt8[Array, "... c/16"], Float[Array, "... c"]]:
    """Codes from 0 to 15, scales as bits, and the latent divided by them, as `nuq4` chooses them."""
    reach = jnp.max(jnp.abs(codebook))
    blocks = _grouped(latent, BLOCK)
    bits, scaled = _choose_scales(blocks, reach, _NUQ4_STEPS, lambda x: nearest_level(x, codebook))
    scaled = scaled.reshape(latent.shape)
    return nearest_code(scaled, codebook), bits, scaled


def _nuq4_pack(latent: Array, codebook: Array | None) -> Parts:
    require_halves("nuq4", latent.shape[-1])
    assert codebook is not None
    codes, bits, _ = codebook_codes(latent, codebook)
    return {"latent": pack_nibbles(codes), "scale": bits}


def _nuq4_unpack(parts: Mapping[str, Array]) -> Array:
    values = level_values(unpack_nibbles(parts["latent"]), parts["codebook"])
    return _ungrouped(_grouped(values, BLOCK) * scale_values(parts["scale"])[..., None], values.shape[-1])


def _fp8_rope_pack(rope: Array) -> Parts:
    codes, scale = _e4m3_pack(rope)
    return {"rope": codes, "rope_scale": scale[..., None]}


_PLAIN_ROPE = RopeFormat(
    parts=lambda r: {"rope": _part(r, np.float32, False)},
    pack=lambda rope: {"rope": rope},
    unpack=lambda parts: parts["rope"],
)
_ROPES = {
    "bf16": RopeFormat(
        parts=lambda r: {"rope": _part(r, np.uint16, False)},
        pack=lambda rope: {"rope": to_bf16_bits(rope)},
        unpack=lambda parts: from_bf16_bits(parts["rope"]),
    ),
    "fp8": RopeFormat(
        parts=lambda r: {"rope": _part(r, np.uint8, False), "rope_scale": _part(1, np.float32, False)},
        pack=_fp8_rope_pack,
        unpack=lambda parts: from_e4m3_bits(parts["rope"]) * parts["rope_scale"],
    ),
}

FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format(
            name="f32",
            latent_parts=lambda c: {"latent": _part(c, np.float32, True)},
            pack_latent=lambda latent, codebook: {"latent": latent},
            unpack_latent=lambda parts: parts["latent"],
            rope=_PLAIN_ROPE,
            exact=True,
        ),
        Format(
            name="bf16",
            latent_parts=lambda c: {"latent": _part(c, np.uint16, True)},
            pack_latent=lambda latent, codebook: {"latent": to_bf16_bits(latent)},
            unpack_latent=lambda parts: from_bf16_bits(parts["latent"]),
            rope=_ROPES["bf16"],
        ),
        Format(
            name="fp8",
            latent_parts=lambda c: {
                "latent": _part(c, np.uint8, True),
                "scale": _part(_groups(c, FP8_GROUP), np.float32, False),
            },
            pack_latent=_fp8_pack,
            unpack_latent=_fp8_unpack,
            rope=_ROPES["bf16"],
        ),
        Format(
            name="int8",
            latent_parts=lambda c: {
                "latent": _part(c, np.int8, True),
                "scale": _part(_groups(c, INT8_GROUP), np.uint16, False),
            },
            pack_latent=_int8_pack,
            unpack_latent=_int8_unpack,
            rope=_ROPES["bf16"],
        ),
        Format(
            name="fp4",
            latent_parts=_four_bit_parts("fp4"),
            pack_latent=_fp4_pack,
            unpack_latent=_fp4_unpack,
            rope=_ROPES["bf16"],
            dims_per_entry=2,
        ),
        Format(
            name="nuq4",
            latent_parts=_four_bit_parts("nuq4"),
            pack_latent=_nuq4_pack,
            unpack_latent=_nuq4_unpack,
            rope=_ROPES["bf16"],
            dims_per_entry=2,
            codebook=True,
        ),
    )
}


@functools.cache  # one object per choice: formats are static arguments of compiled functions
def _with_rope(name: str, rope: str) -> Format:
    return dataclasses.replace(FORMATS[name], rope=_ROPES[rope])


def get_format(name: str, rope: str = "bf16") -> Format:
    """The format of that name, with the rope key in `bf16` or `fp8`.

    Raises:
      ConfigError: an unknown name, which lists the known ones, or a rope format that does not go with it.
    """
    require_cache_format(name, rope)
    return FORMATS[name] if rope == "bf16" else _with_rope(name, rope)
