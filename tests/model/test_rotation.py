"""Rotated latents: another basis in the cache, the same function."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mlaflax.cache import LatentCache
from mlaflax.config import AttentionConfig, ConfigError, ModelConfig, MoEConfig
from mlaflax.formats import GAUSSIAN_CODEBOOK
from mlaflax.model import Transformer, init_model
from mlaflax.model.rotation import rotation

CONFIG = ModelConfig(
    vocab_size=64, num_layers=3, hidden_size=32, mlp_size=48, max_length=64, init_std=0.2,
    attention=AttentionConfig(2, 0, 96, 8, 4, 8), moe=MoEConfig(4, 1, 2, 16, first_dense=1),
)  # fmt: skip
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 24)).astype(np.int32))


def make(seed: int = 1) -> Transformer:
    model = init_model(CONFIG, seed=seed)
    # Weights of norms are 1 at first, and 1 cannot tell whether it was folded.
    for _, module in nnx.iter_modules(model):
        if hasattr(module, "kv_norm"):
            scale = module.kv_norm.scale
            scale[...] = scale[...] * jnp.linspace(0.5, 1.5, scale.shape[-1])
    return model


def logits(model: Transformer) -> np.ndarray:
    return np.asarray(jax.jit(lambda m: m.logits(m(TOKENS).hidden))(model))


@pytest.mark.parametrize("c", [1, 32, 96, 128, 512])
def test_rotations_are_orthogonal(c):
    matrix = rotation(c)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(c), atol=1e-5)
    np.testing.assert_array_equal(matrix, rotation(c))


def test_every_stored_dim_mixes_as_many_as_a_power_of_two_allows():
    assert (np.count_nonzero(rotation(128), axis=0) == 128).all()
    assert (np.count_nonzero(rotation(96), axis=0) == 32).all()


@pytest.mark.parametrize("form", ["stacked", "unstacked"])
def test_the_function_stays_the_same(form):
    model = make() if form == "stacked" else make().unstacked()
    before = logits(model)
    assert before.std() > 0.5
    np.testing.assert_allclose(logits(model.rotated()), before, atol=1e-4)


def test_what_is_stored_is_rotated():
    model = make()

    def stored(model):
        cache = LatentCache.create(CONFIG, "f32", num_sequences=2, max_length=24)
        cache = model(TOKENS, cache=cache).cache
        return [np.asarray(cache.read(layer, 0, 24)["latent"]) for layer in range(3)]

    for plain, turned in zip(stored(model), stored(model.rotated()), strict=True):
        np.testing.assert_allclose(turned, plain @ rotation(96), atol=1e-4)


def test_codebooks_are_put_into_a_model_and_come_out_again():
    levels = GAUSSIAN_CODEBOOK * np.linspace(0.8, 1.2, 3, dtype=np.float32)[:, None]
    for model in (make(), make().unstacked()):
        assert model.codebooks() is None
        model = model.with_codebooks(levels)
        np.testing.assert_array_equal(model.codebooks(), levels)
        # The training graph reads them.
        one, other = (m.simulating(cache_format="nuq4") for m in (model, make()))
        assert np.abs(logits(one) - logits(other)).max() > 1e-3
    with pytest.raises(ConfigError, match=r"codebooks = \(2, 16\): must be of shape \(3, 16\)"):
        make().with_codebooks(levels[:2])


def test_simulating_leaves_the_model_itself_alone():
    model = make()
    before = logits(model)
    other = model.simulating(cache_format="fp4")
    assert other.config == dataclasses.replace(CONFIG, cache_format="fp4")
    assert np.abs(logits(other) - before).max() > 1e-2
    np.testing.assert_array_equal(logits(model), before)
    np.testing.assert_array_equal(logits(other.simulating(cache_format="f32")), before)
