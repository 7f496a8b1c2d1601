"""The cache's number formats against ml_dtypes, byte counts against the published layouts."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaflax import formats
from mlaflax.config import ConfigError

# Every format; after the slash, that of the rope key.
NAMES = [
    "f32",
    "bf16",
    *(f"{name}{rope}" for name in ("fp8", "int8", "fp4", "nuq4") for rope in ("", "/fp8")),
]


def get_format(name: str) -> formats.Format:
    return formats.get_format(*name.split("/"))


@functools.partial(jax.jit, static_argnames="name")
def pack(name: str, latent, rope=None) -> dict[str, jax.Array]:
    """The packed parts, and the Gaussian codebook where there must be one."""
    fmt = get_format(name)
    codebook = jnp.asarray(formats.GAUSSIAN_CODEBOOK) if fmt.codebook else None
    rope = jnp.zeros((*latent.shape[:-1], 8)) if rope is None else rope
    parts = fmt.pack(latent, rope, codebook)
    return parts if codebook is None else {**parts, "codebook": codebook}


def round_trip(name: str, latent) -> np.ndarray:
    return np.asarray(get_format(name).unpack_latent(pack(name, latent)))


def normalised(rng, *shape) -> np.ndarray:
    """Gaussian latents of rms 1 per token, as the cache gets them."""
    x = rng.standard_normal(shape)
    return (x / np.sqrt(np.mean(x**2, -1, keepdims=True))).astype(np.float32)


def nmse(x, y) -> float:
    return float(np.sum(np.square(np.float64(x) - y)) / np.sum(np.square(np.float64(x))))


def every_e4m3() -> np.ndarray:
    """All finite e4m3 codes (0x7f and 0xff are NaN)."""
    codes = np.arange(256, dtype=np.uint8)
    return codes[(codes & 0x7F) != 0x7F]


def test_every_e4m3_code_reads_as_ml_dtypes_reads_it():
    codes = every_e4m3()
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    actual = np.asarray(jax.jit(formats.from_e4m3_bits)(codes))
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


def test_e4m3_rounds_as_ml_dtypes_does_at_and_around_every_boundary():
    values = np.sort(every_e4m3().view(ml_dtypes.float8_e4m3fn).astype(np.float64))
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    # At a tie the even code wins; one float32 step to either side decides it.
    x = np.concatenate(
        [middles, np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(-np.inf))]
    )
    expected = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(np.asarray(jax.jit(formats.to_e4m3_bits)(x)), expected)


@pytest.mark.parametrize("x", [449.0, 464.0, 465.0, 1e9, np.inf])
def test_e4m3_saturates_instead_of_turning_into_nan(x):
    both = np.array([x, -x], np.float32)
    np.testing.assert_array_equal(formats.from_e4m3_bits(formats.to_e4m3_bits(both)), [448.0, -448.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_fp8_never_makes_a_number_of_what_is_none(bad):
    fmt = formats.get_format("fp8")
    latent = np.ones((2, 256), np.float32)
    latent[0, 5] = bad
    rope = np.zeros((2, 4), np.float32)
    stored = fmt.unpack_latent(fmt.pack(latent, rope))
    simulated, _ = fmt.simulate(latent, rope)
    for values in (stored, simulated):
        # The 128 dims that share a scale are lost; all others are as they were.
        assert np.isnan(values[0, :128]).all()
        np.testing.assert_array_equal(values[0, 128:], 1.0)
        np.testing.assert_array_equal(values[1], 1.0)


def test_bf16_bits_round_as_ml_dtypes_does():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(20_000) * 10.0 ** rng.uniform(-30, 30, 20_000)).astype(np.float32)
    expected = x.astype(ml_dtypes.bfloat16)
    bits = jax.jit(formats.to_bf16_bits)(x)
    np.testing.assert_array_equal(np.asarray(bits), expected.view(np.uint16))
    np.testing.assert_array_equal(np.asarray(formats.from_bf16_bits(bits)), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("name", "c", "r", "expected"),
    [
        ("f32", 512, 64, 2304),
        ("bf16", 512, 64, 1152),
        ("fp8", 512, 64, 656),  # FlashMLA's published layout: 512 codes, 4 float32 scales, 64 bfloat16
        ("fp8", 256, 32, 256 + 2 * 4 + 64),
        ("fp8", 64, 16, 64 + 4 + 32),  # fewer dims than a group still need one scale
        ("fp8/fp8", 512, 64, 512 + 16 + 64 + 4),
        ("int8", 512, 64, 672),
        ("int8", 40, 16, 40 + 2 * 2 + 32),
        ("int8/fp8", 512, 64, 512 + 32 + 64 + 4),
        ("fp4", 512, 64, 416),
        ("fp4/fp8", 512, 64, 356),
        ("nuq4", 512, 64, 416),
        ("nuq4/fp8", 512, 64, 356),
    ],
)
def test_bytes_per_token(name, c, r, expected):
    fmt = get_format(name)
    assert fmt.bytes_per_token(c, r) == expected
    packed = pack(name, jnp.ones((3, c)), jnp.ones((3, r)))
    packed.pop("codebook", None)  # one for all tokens
    assert {name: (part.shape, part.dtype) for name, part in packed.items()} == {
        name: ((3, part.size), part.dtype) for name, part in fmt.parts(c, r).items()
    }
    assert sum(part.nbytes for part in packed.values()) == 3 * expected


@pytest.mark.parametrize("c", [64, 128, 200, 512])
def test_fp8_scales_each_group_of_128_to_its_largest_value(c):
    rng = np.random.default_rng(1)
    latent = rng.standard_normal((5, c)).astype(np.float32) * np.float32(10.0) ** rng.integers(-3, 3, (5, 1))
    latent[0] = 0
    packed = formats.get_format("fp8").pack(jnp.asarray(latent), jnp.zeros((5, 8)))
    back = np.asarray(formats.get_format("fp8").unpack_latent(packed))
    assert back[0].tolist() == [0.0] * c
    for start in range(0, c, 128):
        group = latent[:, start : start + 128]
        largest = np.abs(group).max(1, keepdims=True)
        error = np.abs(back[:, start : start + 128] - group)
        # e4m3 keeps 4 significant bits, down to its smallest normal number 2^-6 of 448.
        assert (error <= np.maximum(np.abs(group) * 2.0**-4, largest / 448 * 2.0**-10) * 1.0001).all()


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(NAMES), st.integers(0, 2**32 - 1))
def test_simulated_values_are_the_packed_ones_to_the_bit(name, seed):
    rng = np.random.default_rng(seed)
    latent, rope = (jnp.asarray(rng.standard_normal((4, n)), jnp.float32) for n in (64, 16))
    fmt = get_format(name)
    parts = pack(name, latent, rope)
    simulated = fmt.simulate(latent, rope)
    np.testing.assert_array_equal(np.asarray(simulated[0]), np.asarray(fmt.unpack_latent(parts)))
    np.testing.assert_array_equal(np.asarray(simulated[1]), np.asarray(fmt.unpack_rope(parts)))


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_passes_straight_through(name):
    rng = np.random.default_rng(2)
    latent, rope, weight, weight_rope = (
        jnp.asarray(rng.standard_normal((4, n)), jnp.float32) for n in (64, 16) * 2
    )

    def loss(latent, rope):
        a, b = get_format(name).simulate(latent, rope)
        return jnp.sum(a * weight) + jnp.sum(b * weight_rope)

    gradient = jax.grad(loss, argnums=(0, 1))(latent, rope)
    np.testing.assert_array_equal(gradient[0], weight)
    np.testing.assert_array_equal(gradient[1], weight_rope)


@pytest.mark.parametrize("name", ["fp9", "fp4/fp4", "f32/fp8", "bf16/fp8"])
def test_unknown_formats_and_pairs_list_the_known_ones(name):
    message = {
        "fp9": "cache_format = 'fp9': must be one of 'f32', 'bf16', 'fp8', 'int8', 'fp4', 'nuq4'",
        "fp4/fp4": "rope_format = 'fp4': must be one of 'bf16', 'fp8'",
    }.get(
        name, "rope_format = 'fp8': goes with cache_format 'fp8', 'int8', 'fp4', 'nuq4', 'mixed' only, not "
    )
    with pytest.raises(ConfigError, match=message):
        get_format(name)


def test_a_format_is_one_object_however_often_it_is_asked_for():
    assert all(get_format(name) is get_format(name) for name in NAMES)


# --- int8 ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 31, 32, 33, 100]), st.integers(-20, 20), st.integers(0, 2**32 - 1))
def test_int8_is_what_numpy_makes_of_it(c, exponent, seed):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((3, c)) * 10.0**exponent).astype(np.float32)
    parts = pack("int8", x)
    back = round_trip("int8", x)
    for i, start in enumerate(range(0, c, 32)):
        block = x[:, start : start + 32]
        scale = (np.abs(block).max(1) / np.float32(127)).astype(ml_dtypes.bfloat16)
        stored = np.asarray(parts["scale"])[:, i].view(ml_dtypes.bfloat16).astype(np.float64)
        # XLA may divide by multiplying with 1/127: a step of bfloat16, 2^-8, at a boundary.
        np.testing.assert_allclose(stored, scale.astype(np.float64), rtol=2.0**-7)
        codes = np.clip(np.rint(block / stored[:, None]), -127, 127)
        ours = np.asarray(parts["latent"])[:, start : start + 32]
        distance = np.abs(block / stored[:, None] - ours)
        assert (np.abs(codes - ours) <= 1).all() and (
            distance <= 0.5 + 0.3 * (np.abs(ours) == 127) + 1e-4
        ).all()
        np.testing.assert_allclose(back[:, start : start + 32], ours * stored[:, None], rtol=1e-6)


# --- The 4-bit formats ---------------------------------------------------------------------------------------


def test_every_e2m1_code_reads_as_ml_dtypes_reads_it():
    codes = np.arange(16, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    actual = np.asarray(jax.jit(formats.from_e2m1_codes)(codes))
    np.testing.assert_array_equal(actual / formats.E2M1_UNIT, expected)


def test_e2m1_rounds_as_ml_dtypes_does_at_and_around_every_boundary():
    values = np.sort(np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    middles = (values[1:] + values[:-1]) / 2
    x = np.concatenate([middles, np.nextafter(middles, np.float32(9)), np.nextafter(middles, np.float32(-9))])
    x = np.concatenate([x, np.linspace(-8, 8, 1001, dtype=np.float32), [1e9, -1e9, np.inf, 1e-30, -1e-30]])
    x = x.astype(np.float32)[np.abs(x) > 0]  # the sign of a rounded 0 is asked below
    expected = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(np.asarray(jax.jit(formats.to_e2m1_codes)(x)), expected.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(formats.round_to_e2m1(x)), expected.astype(np.float32))
    np.testing.assert_array_equal(formats.to_e2m1_codes(np.float32([0.0, -0.0])), [0, 8])


def test_the_low_nibbles_are_the_first_half_of_the_dims():
    codes = np.arange(16, dtype=np.uint8)
    packed = np.asarray(formats.pack_nibbles(jnp.asarray(codes)))
    np.testing.assert_array_equal(packed & 15, codes[:8])
    np.testing.assert_array_equal(packed >> 4, codes[8:])
    np.testing.assert_array_equal(formats.unpack_nibbles(jnp.asarray(packed)), codes)


def test_a_scale_is_an_e4m3_number_times_a_power_of_two():
    codes = np.arange(128, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / 32
    np.testing.assert_array_equal(formats.scale_values(jnp.asarray(codes)), expected)


def levels(name: str) -> np.ndarray:
    if name == "nuq4":
        return formats.GAUSSIAN_CODEBOOK
    return np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


@pytest.mark.parametrize("name", ["fp4", "nuq4"])
def test_fp4_and_nuq4_read_back_level_times_scale(name):
    x = normalised(np.random.default_rng(3), 5, 64)
    parts = pack(name, x)
    packed = np.asarray(parts["latent"])
    codes = np.concatenate([packed & 15, packed >> 4], 1).reshape(5, 4, 16)
    scale = np.asarray(parts["scale"]).view(ml_dtypes.float8_e4m3fn).astype(np.float32) / 32
    # nuq4's levels are worked out as a polynomial, in float32.
    np.testing.assert_allclose(
        round_trip(name, x).reshape(5, 4, 16),
        levels(name)[codes] * scale[..., None],
        rtol=2e-6 if name == "nuq4" else 0,
    )


@pytest.mark.parametrize(("name", "slack"), [("fp4", 1.03), ("nuq4", 1.03)])
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1), st.floats(-2, 0.7))
def test_codes_are_the_nearest_and_scales_nearly_the_best(name, slack, seed, exponent):
    rng = np.random.default_rng(seed)
    x = (normalised(rng, 40, 64) * 10.0**exponent).astype(np.float32)
    blocks = x.reshape(40, 4, 16, 1)
    scale = np.asarray(pack(name, x)["scale"]).view(ml_dtypes.float8_e4m3fn).astype(np.float32) / 32
    best = np.abs(blocks - levels(name) * scale[..., None, None]).min(-1)
    error = np.abs(blocks[..., 0] - round_trip(name, x).reshape(40, 4, 16))
    assert (error <= best + 1e-6 * np.abs(blocks[..., 0]).max(-1, keepdims=True)).all()
    # Every scale there is, by brute force.
    least = np.full((40, 4), np.inf)
    for s in every_e4m3()[:127].view(ml_dtypes.float8_e4m3fn).astype(np.float32) / 32:
        least = np.minimum(least, np.square(np.abs(blocks - levels(name) * s).min(-1)).sum(-1))
    assert (error**2).sum() <= slack * least.sum()


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("bf16", 1e-6, 4e-6),
        # 2^-8 / 3 a uniform mantissa's, less what Gaussian values make of it.
        ("fp8", 5.5e-4, 8e-4),
        # (amax / 127)^2 / 12, amax of 32 Gaussian values about 2.1.
        ("int8", 2.5e-5, 3.4e-5),
        # Between a full search over scales (6.6e-3) and amax/6 against amax/4 (7.6e-3).
        ("fp4", 6.55e-3, 6.9e-3),
        # Above Lloyd-Max for the values themselves at 16 levels (9.5e-3, Max 1960) it would be of no use.
        ("nuq4", 4.7e-3, 5.2e-3),
    ],
)
def test_error_on_gaussian_latents(name, low, high):
    x = normalised(np.random.default_rng(4), 400, 512)
    assert low < nmse(x, round_trip(name, x)) < high


@pytest.mark.parametrize("name", ["fp4", "nuq4"])
def test_what_is_on_the_grid_stays(name):
    """Packing what was unpacked changes nothing that is read: an error of 0 cannot be beaten.

    A codebook's scales are looked for from its largest level on: blocks that do not use it may move.
    """
    x = normalised(np.random.default_rng(5), 50, 64)
    once, packed = round_trip(name, x), np.asarray(pack(name, x)["latent"])
    codes = np.concatenate([packed & 15, packed >> 4], 1).reshape(50, 4, 16)
    stays = np.isin(codes, (0, 15)).any(-1) if name == "nuq4" else np.ones((50, 4), bool)
    assert stays.mean() > 0.2
    np.testing.assert_allclose(
        round_trip(name, once).reshape(50, 4, 16)[stays], once.reshape(50, 4, 16)[stays], rtol=1e-6
    )


@pytest.mark.parametrize("name", ["fp4", "nuq4"])
@pytest.mark.parametrize("rms", [1e-1, 1e-2, 1e-3])
def test_small_blocks_keep_their_codes(name, rms):
    rng = np.random.default_rng(6)
    x = normalised(rng, 200, 512)
    usual = nmse(x, round_trip(name, x))
    x[:, 16:32] *= rms
    small = x[:, 16:32].copy()
    back = round_trip(name, x)[:, 16:32]
    # Down to 1e-3, scales are normal e4m3 numbers or nearly; a lost scale would cost all of it.
    assert nmse(small, back) < 1.6 * usual
    whole = normalised(rng, 200, 512) * np.float32(rms)
    assert nmse(whole, round_trip(name, whole)) < 1.6 * usual


@pytest.mark.parametrize("name", ["fp4", "nuq4"])
@settings(deadline=None, max_examples=20)
@given(st.floats(-40, -3), st.integers(0, 2**32 - 1))
def test_what_is_too_small_for_a_scale_is_off_by_no_more_than_its_share(name, exponent, seed):
    """Below the smallest scale, 2^-14, no error exceeds half of it, a 30000th of a normalised latent."""
    x = (np.random.default_rng(seed).standard_normal((4, 64)) * 10.0**exponent).astype(np.float32)
    back = round_trip(name, x)
    assert (np.abs(back - x) <= np.maximum(np.abs(x).max(1, keepdims=True) * 0.25, 2.0**-15)).all()


@pytest.mark.parametrize("name", ["fp8", "int8", "fp4", "nuq4"])
def test_zeros_read_back_as_zeros_beside_anything(name):
    x = np.zeros((3, 256), np.float32)
    x[1, 128:] = 1.0
    x[2, :128] = -1e6
    back = round_trip(name, x)
    assert (back[x == 0] == 0).all() and (back[x != 0] != 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "group"), [("int8", 32), ("fp4", 16), ("nuq4", 16)])
def test_a_block_that_holds_no_number_reads_back_as_none(name, group, bad):
    x = np.ones((2, 64), np.float32)
    x[0, group + 3] = bad
    clean = round_trip(name, np.ones((2, 64), np.float32))
    for values in (round_trip(name, x), get_format(name).simulate(jnp.asarray(x), jnp.zeros((2, 4)))[0]):
        assert np.isnan(values[0, group : 2 * group]).all()
        rest = np.ones((2, 64), bool)
        rest[0, group : 2 * group] = False
        np.testing.assert_array_equal(np.asarray(values)[rest], clean[rest])


@pytest.mark.parametrize("huge", [1e6, 1e30, 3e38])
@pytest.mark.parametrize("name", ["fp4", "nuq4"])
def test_huge_values_are_clamped_to_the_largest_there_is(name, huge):
    x = np.full((1, 32), huge, np.float32)
    x[0, 1], x[0, 16:] = -huge, 1.0
    largest = np.abs(levels(name)).max() * 448 / 32
    back = round_trip(name, x)
    np.testing.assert_allclose(back[0, :2], [largest, -largest], rtol=0.15)
    np.testing.assert_array_equal(back[0, 16:], round_trip(name, np.ones((1, 32), np.float32))[0, 16:])


@pytest.mark.parametrize(("name", "c"), [("fp4", 7056), ("nuq4", 1444)])
def test_a_latent_that_normalisation_can_yield_is_never_clamped(name, c):
    """All of a token's power in one dim: sqrt(c). Half an e4m3 step, 1/16, may be missing."""
    x = np.zeros((1, 32), np.float32)
    x[0, 7:9] = np.sqrt(c), -np.sqrt(c)
    np.testing.assert_allclose(np.abs(round_trip(name, x)[0, 7:9]), np.sqrt(c), rtol=1 / 16)


@settings(deadline=None, max_examples=8)
@given(st.sampled_from(["fp4", "nuq4"]), st.integers(1, 3), st.lists(st.integers(0, 2), max_size=2))
def test_any_leading_axes_and_any_even_number_of_blocks(name, pairs, lead):
    x = normalised(np.random.default_rng(pairs), *lead, 32 * pairs)
    back = round_trip(name, x)
    assert back.shape == x.shape and back.dtype == np.float32
    if x.size:
        assert nmse(x, back) < 0.03


@pytest.mark.parametrize("name", ["fp4", "nuq4"])
def test_a_latent_that_has_no_two_halves_of_whole_blocks_is_refused(name):
    message = f"attention.kv_lora_rank = 48: must be a multiple of 32 for cache_format = '{name}'"
    with pytest.raises(ConfigError, match=message):
        get_format(name).parts(48, 8)
    with pytest.raises(ConfigError, match=message):
        get_format(name).simulate(jnp.ones((1, 48)), jnp.ones((1, 8)))


def test_nuq4_needs_a_codebook_to_pack_and_uses_the_one_it_is_given():
    fmt = get_format("nuq4")
    x = normalised(np.random.default_rng(8), 4, 64)
    with pytest.raises(ValueError, match="codebook = None: format nuq4 needs one"):
        fmt.pack(x, jnp.zeros((4, 8)))
    uneven = jnp.asarray(np.sort(np.random.default_rng(9).uniform(-1, 3, 16)), jnp.float32)
    parts = {**fmt.pack(jnp.asarray(x), jnp.zeros((4, 8)), uneven), "codebook": uneven}
    read = fmt.unpack_latent(parts)
    np.testing.assert_array_equal(fmt.simulate(jnp.asarray(x), jnp.zeros((4, 8)), uneven)[0], read)
    assert nmse(x, read) > nmse(x, round_trip("nuq4", x))


# --- The rope key --------------------------------------------------------------------------------------------


def test_an_fp8_rope_key_is_e4m3_of_its_largest_in_either_layout():
    rng = np.random.default_rng(10)
    rope = (rng.standard_normal((6, 64)) * 10.0 ** rng.integers(-3, 4, (6, 1))).astype(np.float32)
    rope[0] = 0
    fmt = get_format("int8/fp8")
    parts = pack("int8/fp8", np.ones((6, 32), np.float32), rope)
    back = np.asarray(fmt.unpack_rope(parts))
    scale = np.abs(rope).max(1, keepdims=True) / 448
    codes = (rope / np.where(scale == 0, 1, scale)).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(parts["rope"]), codes.view(np.uint8))
    np.testing.assert_allclose(back, codes.astype(np.float32) * scale, rtol=1e-6)
    columns = {name: jnp.swapaxes(part, 0, 1) for name, part in parts.items()}
    np.testing.assert_array_equal(fmt.unpack_rope(columns), back.T)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_fp8_rope_key_that_is_no_number_reads_back_as_none(bad):
    rope = np.ones((2, 8), np.float32)
    rope[0, 3] = bad
    back = np.asarray(get_format("fp4/fp8").unpack_rope(pack("fp4/fp8", np.ones((2, 32), np.float32), rope)))
    assert np.isnan(back[0]).all()
    np.testing.assert_array_equal(back[1], 1.0)
