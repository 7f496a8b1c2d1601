"""The cache's number formats against ml_dtypes, byte counts against the published layouts."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaflax import formats
from mlaflax.config import ConfigError


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
    ],
)
def test_bytes_per_token(name, c, r, expected):
    fmt = formats.get_format(name)
    assert fmt.bytes_per_token(c, r) == expected
    packed = fmt.pack(jnp.ones((3, c)), jnp.ones((3, r)))
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


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(["f32", "bf16", "fp8"]), st.integers(0, 2**32 - 1))
def test_simulated_values_are_the_packed_ones_to_the_bit(name, seed):
    rng = np.random.default_rng(seed)
    latent, rope = (jnp.asarray(rng.standard_normal((4, n)), jnp.float32) for n in (64, 16))
    fmt = formats.get_format(name)
    parts = fmt.pack(latent, rope)
    simulated = fmt.simulate(latent, rope)
    np.testing.assert_array_equal(np.asarray(simulated[0]), np.asarray(fmt.unpack_latent(parts)))
    np.testing.assert_array_equal(np.asarray(simulated[1]), np.asarray(fmt.unpack_rope(parts["rope"])))


@pytest.mark.parametrize("name", ["f32", "bf16", "fp8"])
def test_the_gradient_passes_straight_through(name):
    rng = np.random.default_rng(2)
    latent, rope, weight, weight_rope = (
        jnp.asarray(rng.standard_normal((4, n)), jnp.float32) for n in (64, 16) * 2
    )

    def loss(latent, rope):
        a, b = formats.get_format(name).simulate(latent, rope)
        return jnp.sum(a * weight) + jnp.sum(b * weight_rope)

    gradient = jax.grad(loss, argnums=(0, 1))(latent, rope)
    np.testing.assert_array_equal(gradient[0], weight)
    np.testing.assert_array_equal(gradient[1], weight_rope)


def test_an_unknown_format_lists_the_known_ones():
    with pytest.raises(ConfigError, match="cache_format = 'fp7': must be one of 'f32', 'bf16', 'fp8'"):
        formats.get_format("fp7")
