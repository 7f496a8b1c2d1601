"""The decoder: one graph with and without a cache, stacked or not, padded, packed, rematerialised, sharded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mlaflax.cache import LatentCache
from mlaflax.checkpoint import model_trees
from mlaflax.config import AttentionConfig, ModelConfig, MoEConfig, RopeConfig
from mlaflax.formats import GAUSSIAN_CODEBOOK
from mlaflax.model import Transformer, init_model
from mlaflax.model.mla import Codebook
from mlaflax.sharding import make_mesh

# Weights large enough that logits spread and attention is far from uniform.
CONFIG = ModelConfig(
    vocab_size=96,
    num_layers=3,
    hidden_size=48,
    mlp_size=96,
    max_length=512,
    init_std=0.15,
    attention=AttentionConfig(
        3, 24, 32, 16, 8, 16, RopeConfig(factor=4, original_length=64, mscale_all_dim=1)
    ),
    moe=MoEConfig(8, 1, 2, 24, first_dense=1, num_groups=4, top_groups=2),
)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return init_model(CONFIG, seed=1)


def tokens(b, q, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (b, q)), jnp.int32)


def run(model, *args, **kwargs):
    graph, state = nnx.split(model)

    @jax.jit
    def forward(state, args, kwargs):
        model = nnx.merge(graph, state)
        out = model(*args, **kwargs)
        return model.logits(out.hidden), out.cache, out.aux

    return forward(state, args, kwargs)


def test_unstacked_layers_give_the_same_logits_and_loads(model):
    x = tokens(2, 40)
    stacked, _, aux = run(model, x)
    single, _, aux_single = run(model.unstacked(), x)
    np.testing.assert_allclose(single, stacked, atol=2e-5)
    np.testing.assert_array_equal(aux["expert_load"], aux_single["expert_load"])
    assert aux["expert_load"].shape == (2, 8)
    assert (aux["expert_load"].sum(1) == 2 * 40 * 2).all()


@pytest.mark.parametrize("unstack", [False, True])
def test_absorbed_equals_naive_in_ragged_chunks(model, unstack):
    x = tokens(2, 150)
    want = run(model, x)[0]
    assert want.std() > 1
    served = model.unstacked() if unstack else model
    cache, start = LatentCache.create(CONFIG, "f32", num_sequences=2, max_length=256), 0
    for n in (1, 70, 1, 78):
        positions = jnp.broadcast_to(jnp.arange(start, start + n), (2, n))
        logits, cache, _ = run(served, x[:, start : start + n], positions, cache=cache)
        np.testing.assert_allclose(logits, want[:, start : start + n], atol=1e-4)
        start += n


def test_packed_and_padded_rows_equal_separate_ones(model):
    a, b = tokens(1, 30, 1), tokens(1, 45, 2)
    want_a, want_b = run(model, a)[0][0], run(model, b)[0][0]
    packed = jnp.concatenate([a, b], 1)
    positions = jnp.concatenate([jnp.arange(30), jnp.arange(45)])[None]
    got = run(model, packed, positions, jnp.repeat(jnp.array([1, 2]), jnp.array([30, 45]))[None])[0][0]
    np.testing.assert_allclose(got[:30], want_a, atol=2e-5)
    np.testing.assert_allclose(got[30:], want_b, atol=2e-5)
    # Padding on the left, holding tokens that also occur in the text: only the segment id says so.
    padded = jnp.concatenate([b[:, :15], a], 1)
    ids = (jnp.arange(45) >= 15).astype(jnp.int32)[None]
    got, _, aux = run(model, padded, jnp.maximum(jnp.arange(45) - 15, 0)[None], ids)
    np.testing.assert_allclose(got[0, 15:], want_a, atol=2e-5)
    assert (aux["expert_load"].sum(1) == 30 * 2).all()


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_rematerialisation_changes_no_gradient(model, remat):
    x = tokens(2, 24)

    def gradient(model):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        @jax.jit
        @jax.grad
        def of_loss(params):
            model = nnx.merge(graph, params, rest)
            return jnp.mean(jax.nn.logsumexp(model.logits(model(x).hidden), -1))

        return of_loss(params)

    changed = init_model(dataclasses.replace(CONFIG, remat=remat), seed=1)
    for want, got in zip(*(jax.tree.leaves(gradient(m)) for m in (model, changed)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-4)


def test_gradients_flow_through_the_absorbed_form(model):
    """Prefill through an f32 cache is the same function as the naive form: so are its gradients."""
    x = tokens(1, 20)
    weight = jnp.asarray(np.random.default_rng(3).standard_normal((1, 20, CONFIG.hidden_size)), jnp.float32)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, cached):
        cache = LatentCache.create(CONFIG, "f32", num_sequences=1, max_length=128) if cached else None
        return jnp.sum(nnx.merge(graph, params, rest)(x, cache=cache).hidden * weight)

    naive, absorbed = (jax.jit(jax.grad(loss), static_argnums=1)(params, cached) for cached in (False, True))
    for path, want in nnx.to_flat_state(naive):
        got = dict(nnx.to_flat_state(absorbed))[path]
        scale = float(jnp.abs(want[...]).max())
        np.testing.assert_allclose(got[...], want[...], atol=1e-4 * scale, err_msg=str(path))


def test_compile_time_does_not_grow_with_depth():
    def size(layers):
        config = dataclasses.replace(CONFIG, num_layers=layers)
        model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(model)
        x = jax.ShapeDtypeStruct((1, 16), jnp.int32)
        return len(jax.jit(lambda s, x: nnx.merge(graph, s)(x).hidden).lower(state, x).as_text())

    assert size(20) < 1.05 * size(4)


def test_bfloat16_compute_keeps_float32_weights_and_logits():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    model = init_model(config, seed=1)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    hidden = model(tokens(1, 8)).hidden
    assert hidden.dtype == jnp.bfloat16
    assert model.logits(hidden).dtype == jnp.float32


def test_every_parameter_has_a_logical_axis_and_a_rule():
    """On a mesh of one device per axis the shardings exist: a name without a rule would be an error."""
    model = init_model(CONFIG, seed=1, mesh=make_mesh(devices=jax.devices()[:1]))
    plain = init_model(CONFIG, seed=1)
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, plain)), strict=True):
        np.testing.assert_array_equal(a, b)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        assert variable.get_metadata().get("out_sharding"), path


def test_only_a_nuq4_model_has_codebooks_and_the_training_graph_uses_them(model):
    assert model.codebooks() is None
    config = dataclasses.replace(
        CONFIG, cache_format="nuq4", attention=dataclasses.replace(CONFIG.attention, kv_lora_rank=32)
    )
    model = init_model(config)
    layers = [x for x in (model.dense_layers, model.moe_layers) if x is not None]
    assert all(isinstance(x.attn.codebook, Codebook) for x in layers)
    np.testing.assert_array_equal(model.codebooks(), [GAUSSIAN_CODEBOOK] * config.num_layers)
    trees = model_trees(model)
    assert trees["state"]["moe_layers"]["attn"]["codebook"].shape == (2, 16)
    assert "codebook" not in trees["params"]["moe_layers"]["attn"]

    before = run(model, tokens(1, 20))[0]
    for x in layers:
        x.attn.codebook[...] = x.attn.codebook[...] * jnp.linspace(0.5, 1, 16)
    after = run(model, tokens(1, 20))[0]
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_array_equal(model.unstacked().codebooks(), model.codebooks())
    cache = LatentCache.create(config, "nuq4", num_sequences=1, max_length=128, codebook=model.codebooks())
    served = run(model, tokens(1, 20), cache=cache)[0]
    # A code at a boundary may fall on its other side, and later layers follow it.
    assert np.abs(served - after).mean() < 0.1 * np.abs(served - before).mean()
