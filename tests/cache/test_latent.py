"""The latent cache: what is appended is read back, byte counts are those of the formula, updates are in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlaflax.cache import LatentCache
from mlaflax.config import AttentionConfig, ConfigError, ModelConfig
from mlaflax.formats import get_format

CONFIG = ModelConfig(num_layers=3, attention=AttentionConfig(4, 0, 64, 16, 16, 16), max_length=1024)
C, R = 64, 16


def entries(b, q, seed=0):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.standard_normal((b, q, n)), jnp.float32) for n in (C, R))


@pytest.mark.parametrize("format", ["f32", "bf16", "fp8"])
def test_appended_tokens_are_read_back_whatever_the_chunks(format):
    length = 300
    latent, rope = entries(2, length)
    want = get_format(format).pack(latent, rope)
    cache = LatentCache.create(CONFIG, format, num_sequences=2, max_length=384)
    # Scatter the pages: a block table may point anywhere.
    order = np.random.default_rng(1).permutation(6).reshape(2, 3)
    cache = LatentCache(cache.pool, jnp.asarray(order, jnp.int32), format, 6)
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


@pytest.mark.parametrize(("format", "per_token"), [("f32", 2304), ("bf16", 1152), ("fp8", 656)])
def test_nbytes_is_bytes_per_token_times_tokens_plus_tables(format, per_token):
    config = ModelConfig(num_layers=2)  # 512 + 64
    cache = LatentCache.create(config, format, num_sequences=3, max_length=1000)
    pages = 3 * 8
    assert cache.nbytes() == 2 * pages * 128 * per_token + pages * 4
    assert cache.nbytes() == sum(x.nbytes for x in jax.tree.leaves(cache))


@pytest.mark.parametrize("format", ["f32", "bf16", "fp8"])
def test_append_updates_the_pool_where_it_stands(format):
    cache = LatentCache.create(CONFIG, format, num_sequences=2, max_length=512)
    latent, rope = entries(2, 1)
    append = jax.jit(LatentCache.append, donate_argnums=0)
    args = (jnp.int32(1), latent, rope, jnp.array([[5], [9]]), jnp.ones((2, 1), bool))
    memory = append.lower(cache, *args).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(part.nbytes for part in cache.pool.values())
    assert memory.temp_size_in_bytes < cache.pool["latent"].nbytes // 10
    before = {name: part.unsafe_buffer_pointer() for name, part in cache.pool.items()}
    after = append(cache, *args)
    assert {name: part.unsafe_buffer_pointer() for name, part in after.pool.items()} == before


@pytest.mark.parametrize("field", ["num_sequences", "max_length", "page_size"])
def test_sizes_must_be_positive(field):
    sizes = {"num_sequences": 1, "max_length": 10, "page_size": 16, field: 0}
    with pytest.raises(ConfigError, match=f"{field} = 0: must be greater than 0"):
        LatentCache.create(CONFIG, "f32", **sizes)
