"""The latent cache: what is appended is read back, byte counts are those of the formula, updates are in place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlaflax.cache import LatentCache
from mlaflax.config import AttentionConfig, ConfigError, ModelConfig
from mlaflax.formats import GAUSSIAN_CODEBOOK, get_format

CONFIG = ModelConfig(num_layers=3, attention=AttentionConfig(4, 0, 64, 16, 16, 16), max_length=1024)
C, R = 64, 16
FORMATS = [
    "f32",
    "bf16",
    "fp8",
    "int8",
    "fp4",
    "nuq4",
    "int8/fp8",
    "fp4/fp8",
]  # after the slash, the rope key's


def entries(b, q, seed=0):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.standard_normal((b, q, n)), jnp.float32) for n in (C, R))


def create(config, format, **kwargs) -> LatentCache:
    name, _, rope = format.partition("/")
    return LatentCache.create(config, name, rope_format=rope or "bf16", **kwargs)


@pytest.mark.parametrize("format", FORMATS)
def test_appended_tokens_are_read_back_whatever_the_chunks(format):
    length = 300
    latent, rope = entries(2, length)
    codebook = jnp.asarray(GAUSSIAN_CODEBOOK) if format == "nuq4" else None
    want = jax.jit(get_format(*format.split("/")).pack)(latent, rope, codebook)
    cache = create(CONFIG, format, num_sequences=2, max_length=384)
    # Scatter the pages: a block table may point anywhere.
    order = np.random.default_rng(1).permutation(6).reshape(2, 3)
    cache = dataclasses.replace(cache, block_table=jnp.asarray(order, jnp.int32))
    append = jax.jit(LatentCache.append, donate_argnums=0)
    start = 0
    for n in (1, 127, 1, 100, 71):
        part = slice(start, start + n)
        positions = jnp.broadcast_to(jnp.arange(start, start + n), (2, n))
        cache = append(cache, 1, latent[:, part], rope[:, part], positions, jnp.ones((2, n), bool))
        start += n
    for sequence in range(2):
        got = cache.read(1, sequence, length)
        for name, part in want.items():
            np.testing.assert_array_equal(got[name], part[sequence])
        for other in (0, 2):  # neighbours in the flat pool are untouched
            assert all((np.asarray(part) == 0).all() for part in cache.read(other, sequence, length).values())


def test_padding_and_positions_without_a_page_are_dropped():
    latent, rope = entries(2, 4)
    cache = LatentCache.create(CONFIG, "f32", num_sequences=2, max_length=256, num_pages=2)
    cache = LatentCache(cache.pool, jnp.array([[1, -1], [0, -1]], jnp.int32), "f32", 2)
    positions = jnp.array([[0, 1, 2, 3], [127, 128, 300, -1]])
    valid = jnp.array([[True, False, True, False], [True] * 4])
    pool = cache.append(0, latent, rope, positions, valid).pool["latent"]
    kept = {(1, 0): latent[0, 0], (1, 2): latent[0, 2], (0, 127): latent[1, 0]}
    want = np.zeros(pool.shape, np.float32)
    for (page, offset), value in kept.items():
        want[page, offset] = value
    np.testing.assert_array_equal(pool, want)


@pytest.mark.parametrize(
    ("format", "per_token"),
    [
        ("f32", 2304),
        ("bf16", 1152),
        ("fp8", 656),
        ("int8", 672),
        ("fp4", 416),
        ("fp4/fp8", 356),
        ("nuq4", 416),
    ],
)
def test_nbytes_is_bytes_per_token_times_tokens_plus_tables(format, per_token):
    config = ModelConfig(num_layers=2)  # 512 + 64
    cache = create(config, format, num_sequences=3, max_length=1000)
    pages = 3 * 8
    codebooks = 2 * 16 * 4 if format == "nuq4" else 0
    assert cache.nbytes() == 2 * pages * 128 * per_token + pages * 4 + codebooks
    assert cache.nbytes() == sum(x.nbytes for x in jax.tree.leaves(cache))


@pytest.mark.parametrize("format", FORMATS)
def test_append_updates_the_pool_where_it_stands(format):
    cache = create(CONFIG, format, num_sequences=2, max_length=4096)
    latent, rope = entries(2, 1)
    append = jax.jit(LatentCache.append, donate_argnums=0)
    args = (jnp.int32(1), latent, rope, jnp.array([[5], [9]]), jnp.ones((2, 1), bool))
    memory = append.lower(cache, *args).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(part.nbytes for part in cache.pool.values())
    assert memory.temp_size_in_bytes < cache.pool["latent"].nbytes // 10
    before = {name: part.unsafe_buffer_pointer() for name, part in cache.pool.items()}
    after = append(cache, *args)
    assert {name: part.unsafe_buffer_pointer() for name, part in after.pool.items()} == before


def test_each_layer_is_written_and_read_with_its_own_codebook():
    codebook = np.sort(np.random.default_rng(2).standard_normal((3, 16)), axis=1).astype(np.float32)
    cache = create(CONFIG, "nuq4", num_sequences=1, max_length=8, page_size=8, codebook=jnp.asarray(codebook))
    latent, rope = entries(1, 8)
    positions, valid = jnp.arange(8)[None], jnp.ones((1, 8), bool)
    for layer in range(3):
        cache = cache.append(jnp.int32(layer), latent, rope, positions, valid)
    for layer in range(3):
        want = cache.format.pack(latent, rope, jnp.asarray(codebook[layer]))
        for name, part in cache.read(layer, 0, 8).items():
            np.testing.assert_array_equal(part, want[name][0])
        np.testing.assert_array_equal(cache.layer_pool(layer)["codebook"], codebook[layer])
    assert set(create(CONFIG, "fp4", num_sequences=1, max_length=8).layer_pool(0)) == {
        "latent",
        "scale",
        "rope",
    }


def test_a_codebook_is_gaussian_where_none_is_given_and_a_copy_of_one_that_is():
    sizes = {"num_sequences": 1, "max_length": 8}
    cache = create(CONFIG, "nuq4", **sizes)
    np.testing.assert_array_equal(cache.codebook, [GAUSSIAN_CODEBOOK] * 3)
    given = jnp.ones((3, 16))
    kept = create(CONFIG, "nuq4", **sizes, codebook=given)
    jax.tree.map(lambda array: array.delete(), kept)  # as a step that updates in place does
    assert not given.is_deleted()


@pytest.mark.parametrize(
    ("format", "codebook", "message"),
    [
        ("nuq4", np.zeros((2, 16)), r"codebook = \(2, 16\): must be of shape \(3, 16\)"),
        ("fp4", np.zeros((3, 16)), "codebook = 'an array': must be None: format fp4 needs none"),
        (
            "bf16/fp8",
            None,
            "rope_format = 'fp8': goes with cache_format 'fp8', 'int8', 'fp4', 'nuq4', 'mixed' only, not 'bf16'",
        ),
    ],
)
def test_what_does_not_fit_the_format_is_named(format, codebook, message):
    with pytest.raises(ConfigError, match=message):
        create(CONFIG, format, num_sequences=1, max_length=8, codebook=codebook)


@pytest.mark.parametrize("field", ["num_sequences", "max_length", "page_size"])
def test_sizes_must_be_positive(field):
    sizes = {"num_sequences": 1, "max_length": 10, "page_size": 16, field: 0}
    with pytest.raises(ConfigError, match=f"{field} = 0: must be greater than 0"):
        LatentCache.create(CONFIG, "f32", **sizes)
