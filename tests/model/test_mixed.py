"""The mixed cache: what training simulates is what prefill by any chunking and decode serve.

The simulated graph (whole rows, teacher-forced) against the real cache (packed pages, hot tier, page by page).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlaflax.model.mla as mla
import mlaflax.ops.attention.tiered as tiered
from mlaflax.cache import LatentCache
from mlaflax.config import AttentionConfig, ConfigError, MixedConfig, ModelConfig, MoEConfig
from mlaflax.decode import Engine, EngineConfig, SamplingParams
from mlaflax.formats import Format
from mlaflax.model import Transformer, init_model

A = AttentionConfig(num_heads=2, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
# Lengths end within a page, and lie on both sides of window, page and capacity.
LENGTH = 45
MIXED = MixedConfig(page=4, window=4, sinks=2, salient=5, probe_stride=2)


def make(mixed: MixedConfig = MIXED, layers: int = 2, batch: int = 1) -> tuple[Transformer, jax.Array]:
    config = ModelConfig(
        vocab_size=64, num_layers=layers, hidden_size=32, mlp_size=48, max_length=128, init_std=0.2,
        attention=A, moe=MoEConfig(4, 1, 2, 16, first_dense=1), cache_format="mixed", mixed=mixed,
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 64, (batch, LENGTH)).astype(np.int32)
    return init_model(config, seed=4).unstacked(), jnp.asarray(tokens)


class Served(NamedTuple):
    """Logits `[b, q, w]`, the cache, and for each page, layer and sequence the set of tokens kept at it."""

    logits: np.ndarray
    cache: LatentCache
    kept: list[np.ndarray]
    codes: list[list[dict[str, np.ndarray]]]


def serve(model: Transformer, tokens, chunks: list[int]) -> Served:
    """Append `tokens` in chunks; with chunks of one, the hot codes of each token in each layer, too."""
    config = model.config
    b = tokens.shape[0]
    cache = LatentCache.create(config, "mixed", num_sequences=b, max_length=LENGTH + 3)
    step = jax.jit(lambda token, position, cache: model(token, position, cache=cache)[:2])
    logits, kept, codes, at = [], [], [], 0
    for n in chunks:
        position = jnp.broadcast_to(jnp.arange(at, at + n), (b, n))
        hidden, cache = step(tokens[:, at : at + n], position, cache)
        logits.append(np.asarray(model.logits(hidden)))
        if at % config.mixed.page == 0:
            kept.append(kept_at(cache, at))
        if n == 1:
            codes.append([hot_codes(cache, layer, at) for layer in range(config.num_layers)])
        at += n
    assert at == tokens.shape[1]
    return Served(np.concatenate(logits, axis=1), cache, kept, codes)


def kept_at(cache: LatentCache, position: int) -> np.ndarray:
    """Indices of the tokens kept for queries at that position, int32 `[layers, b, e]`, -1 for none."""
    hot = cache.hot
    assert hot is not None
    page = jnp.full(hot.num_sequences, position // hot.config.page)
    layers = len(hot.index) // hot.num_sequences
    return np.stack([np.asarray(hot.kept(layer, page)) for layer in range(layers)])


def hot_codes(cache: LatentCache, layer: int, position: int) -> dict[str, np.ndarray]:
    hot = cache.hot
    assert hot is not None
    config = hot.config
    page = (
        config.ring + config.kept_pages
    ) * hot.num_sequences * layer + position // config.page % config.ring
    return {
        name: np.asarray(hot.pool[name][page, position % config.page] if part.token_major
                         else hot.pool[name][page, :, position % config.page])
        for name, part in hot.format.parts(A.kv_lora_rank, A.qk_rope_head_dim).items()
    }  # fmt: skip


def forced(model: Transformer, tokens) -> np.ndarray:
    return np.asarray(jax.jit(lambda tokens: model.logits(model(tokens).hidden))(tokens))


def test_exact_tiers_are_the_exact_cache():
    """Whatever is chosen, both tiers hold the same numbers: every key is read once, none twice."""
    model, tokens = make(dataclasses.replace(MIXED, hot="f32", cold="f32"))
    exact = forced(model.simulating(cache_format="f32"), tokens)
    for chunks in ([1] * LENGTH, [LENGTH]):
        np.testing.assert_allclose(serve(model, tokens, chunks).logits, exact, atol=1e-4)


@pytest.mark.parametrize("mixed", [
    MIXED,
    pytest.param(dataclasses.replace(MIXED, hot="fp8", cold="nuq4"), marks=pytest.mark.slow),
    pytest.param(dataclasses.replace(MIXED, sinks=0, salient=0), marks=pytest.mark.slow),
    dataclasses.replace(MIXED, window=0, salient=9),
], ids=["int8+fp4", "fp8+nuq4", "window only", "no window"])  # fmt: skip
def test_same_bytes_and_sets_give_the_same_logits(mixed, monkeypatch):
    """Simulated rounding, with the served bytes and sets put in its place, against step-by-step decode."""
    model, tokens = make(mixed)
    served = serve(model, tokens, [1] * LENGTH)
    layers = model.config.num_layers
    cold = [served.cache.read(layer, 0, LENGTH) for layer in range(layers)]
    hot = [
        {name: np.stack([codes[layer][name] for codes in served.codes]) for name in served.codes[0][layer]}
        for layer in range(layers)
    ]
    calls, layer_at_hand = [], []

    def simulate(fmt: Format, latent, rope, codebook=None):
        layer = len(calls) // 2
        calls.append(fmt.name)
        parts = {
            name: jnp.asarray(part)[None] for name, part in (hot, cold)[len(calls) % 2 == 0][layer].items()
        }
        if fmt.codebook:
            parts["codebook"] = served.cache.codebook[layer]
        return fmt.unpack_latent(parts), fmt.unpack_rope(parts)

    def attend(*args, **kwargs):
        layer_at_hand.append(len(layer_at_hand))
        return original(*args, **kwargs)

    def keep(kept, mass, page, *_):
        sets = np.stack([sets[layer_at_hand[-1]] for sets in served.kept])  # pages, b, e
        return jnp.asarray(sets)[jnp.minimum(page, len(sets) - 1)]

    original = tiered.tiered_attention
    monkeypatch.setattr(Format, "simulate", simulate)
    monkeypatch.setattr(mla, "tiered_attention", attend)
    monkeypatch.setattr(tiered, "_keep", keep)
    logits = forced(model, tokens)
    assert calls == [mixed.hot, mixed.cold] * layers
    assert logits.std() > 1
    np.testing.assert_allclose(logits, served.logits, atol=1e-4)


def test_without_them_the_first_layer_agrees_and_the_rest_nearly():
    """Each graph with its own bytes and sets. In the first layer nothing upstream can differ."""
    model, tokens = make()
    served = serve(model, tokens, [1] * LENGTH)
    other = serve(model, tokens, [LENGTH])
    first = served.cache.read(0, 0, LENGTH), other.cache.read(0, 0, LENGTH)
    differing = np.mean(
        [np.mean(np.asarray(first[0][name]) != np.asarray(first[1][name])) for name in first[0]]
    )
    assert differing <= 1e-3
    for ours, theirs in ((served, other),):
        sets = [set(kept_at(s.cache, LENGTH)[0, 0].tolist()) for s in (ours, theirs)]
        assert sets[0] == sets[1]
    assert np.mean(np.abs(forced(model, tokens) - served.logits) < 1e-2) > 0.9


def test_the_simulation_matters():
    model, tokens = make()
    exact = forced(model.simulating(cache_format="f32"), tokens)
    assert np.abs(exact - serve(model, tokens, [LENGTH]).logits).max() > 0.1


@pytest.mark.parametrize("chunks", [
    [1] * LENGTH,
    pytest.param([4] * 11 + [1], marks=pytest.mark.slow),
    [3, 30, 12],
    pytest.param([16, 16, 13], marks=pytest.mark.slow),
], ids=["tokens", "pages", "any", "four pages"])  # fmt: skip
def test_any_chunking_keeps_the_same_tokens_and_codes(chunks):
    model, tokens = make(layers=1, batch=2)
    whole, cut = serve(model, tokens, [LENGTH]), serve(model, tokens, chunks)
    np.testing.assert_array_equal(np.sort(kept_at(whole.cache, LENGTH)), np.sort(kept_at(cut.cache, LENGTH)))
    for name, part in whole.cache.pool.items():
        assert np.mean(np.asarray(part) != np.asarray(cut.cache.pool[name])) <= 1e-3
    np.testing.assert_allclose(whole.logits, cut.logits, atol=1e-3)


@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_ragged_sequences_in_any_chunks_are_what_training_simulates(data):
    """Lengths, chunks, and sizes of page, window and salient set, 0 among them; exact formats in the hot tier and
    bfloat16 in the cold one, whose rounding shows which tier a token was read from."""
    page = data.draw(st.sampled_from([2, 4, 8]))
    mixed = MixedConfig(
        hot="f32", cold="bf16", page=page, window=page * data.draw(st.integers(0, 3)),
        sinks=data.draw(st.integers(0, 2)), salient=data.draw(st.sampled_from([0, 1, 6])),
        probe_stride=data.draw(st.sampled_from([1, 2])),
    )  # fmt: skip
    model, tokens = make(mixed, layers=1, batch=3)
    lengths = np.array([data.draw(st.integers(1, LENGTH)) for _ in range(3)])
    width = data.draw(st.integers(1, 20))
    cache = LatentCache.create(model.config, "mixed", num_sequences=3, max_length=LENGTH + 20)
    step = jax.jit(lambda *args, cache: model(*args, cache=cache)[:2])
    got = np.zeros((3, LENGTH + 20, model.config.hidden_size))
    for at in range(0, LENGTH, width):
        position = np.broadcast_to(np.arange(at, at + width), (3, width))
        valid = (position < lengths[:, None]).astype(np.int32)
        padded = np.pad(tokens, ((0, 0), (0, 20)))[:, at : at + width]
        hidden, cache = step(padded, position, valid, cache=cache)
        got[:, at : at + width] = hidden
    simulated = np.asarray(jax.jit(lambda tokens: model(tokens).hidden)(tokens))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(got[row, :length], simulated[row, :length], atol=2e-4)


def test_slots_are_freed_and_used_again():
    """More prompts than slots, of lengths around page and window: each gets what it gets alone."""
    model, _ = make(dataclasses.replace(MIXED, hot="f32", cold="f32"))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 64, n).tolist() for n in (3, 4, 5, 8, 9, 30, 41)]
    sampling = SamplingParams(temperature=0, max_tokens=9)
    engine = Engine(
        model, config=EngineConfig("mixed", max_sequences=2, max_length=64, prefill_chunks=(8, 32))
    )
    together = engine.generate(prompts, sampling)
    plain = Engine(model, config=EngineConfig("f32", max_sequences=1, max_length=64, prefill_chunks=(8, 32)))
    assert [c.tokens for c in together] == [c.tokens for c in plain.generate(prompts, sampling)]
    assert engine.free_pages == 2 * 16


def test_bytes_are_those_of_the_arrays():
    model, _ = make()
    cache = LatentCache.create(model.config, "mixed", num_sequences=3, max_length=40)
    m = model.config.mixed
    cold = 2 * 3 * 10 * 4 * (32 // 2 + 32 // 16 + 4 * 2)
    hot_tokens = (m.ring + m.kept_pages) * m.page
    hot = 2 * 3 * hot_tokens * (32 + 2 + 4 * 2)
    codebooks = 2 * 16 * 4
    tables = codebooks + 3 * 10 * 4 + 2 * 3 * (m.salient * 4 + (m.ring * m.page + m.salient) * 4) + 3 * 4
    assert cache.nbytes() == cold + hot + tables


@pytest.mark.parametrize("wrong, said", [
    ({"window": 6}, r"mixed.window = 6: must be a multiple of mixed.page \(4\)"),
    ({"probe_stride": 3}, r"mixed.probe_stride = 3: must divide mixed.page \(4\)"),
    ({"salient": -1}, "mixed.salient = -1: must be 0 or more"),
    ({"hot": "fp4"}, "mixed.hot = 'fp4': must be one of"),
    ({"window": 400}, r"mixed.window = 400: must be below max_length \(128\)"),
    ({"salient": 400}, r"mixed.sinks \+ mixed.salient = 402: must be below max_length \(128\)"),
])  # fmt: skip
def test_tiers_that_cannot_be_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        make(dataclasses.replace(MIXED, **wrong))


def test_a_cache_cannot_delete_its_cold_tokens():
    model, _ = make(dataclasses.replace(MIXED, cold="none"))
    with pytest.raises(ConfigError, match=r"mixed.cold = 'none': only simulates"):
        LatentCache.create(model.config, "mixed", num_sequences=1, max_length=16)


def test_deleting_cold_tokens_is_attention_to_the_hot_ones_alone():
    """With a window as long as the row nothing is cold, so nothing is deleted."""
    wide = dataclasses.replace(MIXED, hot="f32", window=64)
    model, tokens = make(dataclasses.replace(wide, cold="none"))
    exact = forced(model.simulating(cache_format="f32"), tokens)
    np.testing.assert_allclose(forced(model, tokens), exact, atol=1e-4)
    narrow = forced(model.simulating(mixed=dataclasses.replace(MIXED, hot="f32", cold="none")), tokens)
    assert np.abs(narrow - exact).max() > 0.1
