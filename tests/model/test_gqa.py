"""Grouped-query attention: the model against plain NumPy, its cache against its training graph, its configuration."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mlaflax.cache import LatentCache
from mlaflax.checkpoint import Blueprint, model_trees
from mlaflax.config import (
    AttentionConfig,
    ConfigError,
    GQAConfig,
    ModelConfig,
    RopeConfig,
    from_dict,
    to_dict,
)
from mlaflax.model import init_model
from tests.parity import numpy_reference

LLAMA3 = RopeConfig(
    theta=1e4,
    convention="half",
    factor=8.0,
    original_length=32,
    beta_slow=1.0,
    beta_fast=4.0,
    scaling="llama3",
)
KINDS = {
    "grouped": GQAConfig(6, 2, 16, qkv_bias=True),
    "normalised": GQAConfig(4, 4, 24, qk_norm=True, rope=dataclasses.replace(LLAMA3)),
    "one KV head": GQAConfig(4, 1, 16, rope=RopeConfig(convention="interleaved")),
}
CONFIG = ModelConfig(
    vocab_size=80, num_layers=2, hidden_size=48, mlp_size=96, max_length=256, norm_eps=1e-3, init_std=0.15
)


def make(kind, seed=0, **changes):
    """A model whose biases and norms are not what they begin as, and its parameters."""
    config = dataclasses.replace(CONFIG, attention=KINDS[kind], **changes)
    model = init_model(config, seed)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    moved = jax.tree.map(lambda x: x + 0.15 * jax.random.normal(next(keys), x.shape), params)
    if config.attention.qk_norm:  # attention as peaked as without norms
        norm = moved["dense_layers"]["attn"]["q_norm"]["scale"]
        norm[...] = norm[...] * 2.5
    return config, nnx.merge(graph, moved, rest), jax.tree.map(np.asarray, nnx.to_pure_dict(moved))


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_the_one_in_numpy(kind):
    config, model, params = make(kind)
    tokens = np.random.default_rng(1).integers(0, 80, (2, 70)).astype(np.int32)
    segments = np.ones_like(tokens)
    segments[0, 40:], segments[1, :5] = 2, 0
    positions = np.where(segments == 2, np.arange(70) - 40, np.arange(70)).astype(np.int32)
    trace = numpy_reference.Trace()
    want = numpy_reference.forward(params, config, tokens, positions, segments, trace)
    got = jax.jit(lambda m, *a: m.logits(m(*a).hidden))(model, tokens, positions, segments)
    np.testing.assert_allclose(np.asarray(got)[segments > 0], want[segments > 0], atol=2e-4)
    # Attention that is nearly uniform would hide mistakes in queries, keys and positions.
    assert max(a.max(-1)[..., 30:].mean() for a in trace.attention) > 0.3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["f32", "bf16"])
def test_the_cache_gives_what_the_training_graph_simulates(kind, format):
    _, model, _ = make(kind, cache_format=format)
    tokens = np.random.default_rng(2).integers(0, 80, (2, 200)).astype(np.int32)
    want = jax.jit(lambda m, t: m.logits(m(t).hidden))(model, tokens)

    @jax.jit
    def run(model, tokens, positions, cache):
        output = model(tokens, positions, cache=cache)
        return model.logits(output.hidden), output.cache

    cache = LatentCache.create(model.config, format, num_sequences=2, max_length=256)
    got = []
    for piece in np.split(np.arange(200, dtype=np.int32), [130, 131, 198, 199]):
        at = np.broadcast_to(piece, (2, len(piece)))
        logits, cache = run(model, tokens[:, piece], at, cache)
        got.append(logits)
    # In bf16 a sum in another order may round to the neighbouring number.
    np.testing.assert_allclose(np.concatenate(got, 1), want, atol=1e-4 if format == "f32" else 5e-2)
    if format == "bf16":
        exact = jax.jit(lambda m, t: m.logits(m(t).hidden))(model.simulating(cache_format="f32"), tokens)
        assert np.abs(np.concatenate(got, 1) - want).mean() < np.abs(exact - want).mean() / 4


def test_a_cache_takes_the_bytes_of_keys_and_values():
    config = dataclasses.replace(CONFIG, attention=KINDS["grouped"])
    for format, width in (("f32", 4), ("bf16", 2)):
        cache = LatentCache.create(config, format, num_sequences=3, max_length=256)
        tables = cache.block_table.nbytes
        assert cache.nbytes() - tables == 3 * 256 * 2 * (2 * 2 * 16) * width


def test_json_and_checkpoints_carry_it_and_old_files_mean_latent_attention():
    config = dataclasses.replace(CONFIG, attention=KINDS["normalised"])
    assert from_dict(ModelConfig, json.loads(json.dumps(to_dict(config)))) == config
    old = to_dict(CONFIG)
    del old["attention"]["rope"]["scaling"]
    assert from_dict(ModelConfig, old) == CONFIG
    assert isinstance(from_dict(ModelConfig, {"attention": {}}).attention, AttentionConfig)
    _, model, _ = make("normalised")
    rebuilt = Blueprint(config).build(**model_trees(model))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, nnx.state(rebuilt), nnx.state(model)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_format": "fp8"}, "cache_format = 'fp8': must be 'f32' or 'bf16' for keys and values"),
        ({"cache_format": "mixed"}, "cache_format = 'mixed': must be 'f32' or 'bf16' for keys and values"),
        ({"rope_format": "fp8"}, "rope_format = 'fp8': goes with cache_format"),
        ({"attention": {"num_kv_heads": 4}}, r"attention.num_kv_heads = 4: must divide num_heads \(6\)"),
        ({"attention": {"head_dim": 7}}, "attention.head_dim = 7: must be even"),
        ({"attention": {"kv_heads": 2}}, "attention.kv_heads is not a field of GQAConfig; did you mean"),
    ],
)
def test_what_a_file_may_not_say(changes, message):
    values = to_dict(dataclasses.replace(CONFIG, attention=KINDS["grouped"]))
    values["attention"] |= changes.pop("attention", {})
    with pytest.raises(ConfigError, match=message):
        from_dict(ModelConfig, values | changes)


def test_what_needs_latents_says_so():
    _, model, _ = make("grouped")
    for use in (model.rotated, lambda: model.with_codebooks(jnp.zeros((2, 16)))):
        with pytest.raises(ConfigError, match=r"attention = GQAConfig.*must be an AttentionConfig here"):
            use()
    with pytest.raises(ConfigError, match="cache_format = 'int8': must be 'f32' or 'bf16'"):
        LatentCache.create(model.config, "int8", num_sequences=1, max_length=8)
