"""The engine: greedy tokens equal a full forward pass, batches do not matter, nothing recompiles or copies."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mlaflax.config import AttentionConfig, ConfigError, GQAConfig, ModelConfig, MoEConfig
from mlaflax.decode import Engine, EngineConfig, SamplingParams, cut
from mlaflax.model import init_model

CONFIG = ModelConfig(
    vocab_size=100,
    num_layers=3,
    hidden_size=48,
    mlp_size=96,
    max_length=512,
    init_std=0.15,
    attention=AttentionConfig(4, 0, 32, 16, 8, 16),
    moe=MoEConfig(8, 1, 2, 24, first_dense=1),
)
GROUPED = dataclasses.replace(CONFIG, attention=GQAConfig(4, 2, 16, qkv_bias=True))
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3)


@pytest.fixture(scope="module")
def model():
    return init_model(CONFIG, seed=3)


@pytest.fixture(scope="module", params=["fresh", "restored"])
def engine(model, request):
    if request.param == "restored":  # arrays that are bound to a device, as a checkpoint's are
        graph, state = nnx.split(model)
        model = nnx.merge(graph, jax.device_put(state, jax.devices()[0]))
    engine = Engine(
        model, config=EngineConfig("f32", max_sequences=3, cache_tokens=900, prefill_chunks=(8, 64))
    )
    engine.warm_up()
    return engine


def test_prompts_are_cut_into_chunks_that_are_half_full_at_least():
    chunks = (32, 256, 1024)
    assert cut(1, chunks) == [32]
    assert cut(33, chunks) == [32, 32]
    assert cut(127, chunks) == [32] * 4
    assert cut(128, chunks) == [256]
    assert cut(300, chunks) == [256, 32, 32]
    assert cut(512, chunks) == [1024]
    assert cut(2500, chunks) == [1024, 1024, 256, 256]
    for length in range(1, 3000, 7):
        cuts = cut(length, chunks)
        assert sum(cuts[:-1]) < length <= sum(cuts)
        assert sum(cuts) <= 2 * length or cuts == [32]


def prompts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 100, n).tolist() for n in lengths]


def test_greedy_tokens_and_logprobs_equal_a_full_forward_pass(model, engine):
    check_greedy(model, engine)


@pytest.fixture(scope="module")
def grouped():
    return init_model(GROUPED, seed=3)


def test_keys_and_values_serve_as_latents_do(grouped):
    config = EngineConfig("f32", max_sequences=3, cache_tokens=900, prefill_chunks=(8, 64))
    check_greedy(grouped, Engine(grouped, config=config))
    with pytest.raises(
        ConfigError, match="cache_format = 'fp8': must be 'f32' or 'bf16' for keys and values"
    ):
        Engine(grouped, config=EngineConfig("fp8"))


def check_greedy(model, engine):
    @jax.jit
    def forward(padded):
        return jax.nn.log_softmax(model.logits(model(padded).hidden)[0])

    asked = prompts(3, 40, 130, 300, 17, 1, 64, 65)  # more prompts than slots
    for prompt, got in zip(asked, engine.generate(asked, GREEDY), strict=True):
        sequence = prompt + got.tokens
        # Padding behind the sequence: a causal model does not see it.
        logprobs = forward(jnp.asarray(sequence + [0] * (CONFIG.max_length - len(sequence)))[None])
        rows = np.asarray(logprobs)[len(prompt) - 1 : len(sequence) - 1]
        assert got.tokens == rows.argmax(-1).tolist()
        np.testing.assert_allclose(got.logprobs, rows.max(-1), atol=1e-4)
        for row, top in zip(rows, got.top_logprobs, strict=True):
            assert [i for i, _ in top] == np.argsort(-row)[:3].tolist()
        assert got.finish_reason == "length" and len(got.tokens) == 12
        assert got.token_times == sorted(got.token_times)


def test_sampled_tokens_depend_neither_on_the_batch_nor_on_the_slot(engine):
    asked = prompts(5, 90, 20, 33)
    sampling = [SamplingParams(seed=i, max_tokens=5 + 3 * i, top_p=0.9) for i in range(4)]
    together = engine.generate(asked, sampling)
    for prompt, params, want in zip(asked, sampling, together, strict=True):
        assert engine.generate([prompt], params)[0].tokens == want.tokens


def test_nothing_compiles_after_warm_up(engine):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "compile" in event or "trace" in event else None
    )
    try:
        engine.generate(
            prompts(1, 7, 9, 63, 66, 200, 450, seed=2),
            [
                SamplingParams(temperature=t, top_k=k, max_tokens=9)
                for t, k in zip([0, 1, 2, 0, 1, 2, 0], range(7), strict=True)
            ],
        )
        assert compiled == []
        jax.jit(lambda x: x + len(compiled))(1)
        assert compiled, "the listener hears nothing, so this test proves nothing"
    finally:
        jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize(
    "format", ["f32", "fp8", "mixed", *(pytest.param(x, marks=pytest.mark.slow) for x in ("bf16", "fp4"))]
)
def test_the_decode_step_updates_the_pool_in_place_and_copies_none_of_it(model, format):
    check_in_place(model, format)


@pytest.mark.parametrize("format", ["f32", "bf16"])
def test_the_decode_step_updates_keys_and_values_in_place(grouped, format):
    check_in_place(grouped, format)


def check_in_place(model, format):
    engine = Engine(model, config=EngineConfig(format, max_sequences=2))
    compiled = engine.compile_decode()

    def parts() -> list[jax.Array]:
        hot = engine.cache.hot
        return [*engine.cache.pool.values(), *(hot.pool.values() if hot else ())]

    pool = parts()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= engine.cache.nbytes()
    # The instruction that makes a copy of the pool has the pool's own shape; updates in place are fusions
    # or updates of slices.
    shapes = {f"{part.dtype.name}{list(part.shape)}" for part in pool}
    hlo = compiled.as_text()
    for part in pool:
        kind = {"float32": "f32", "uint16": "u16", "uint8": "u8", "int8": "s8"}[part.dtype.name]
        shape = re.escape(f"{kind}[{','.join(map(str, part.shape))}]")
        assert re.search(shape, hlo), shapes
        assert not re.search(rf"= {shape}\S* (copy|convert|transpose|broadcast|gather)\(", hlo)
    before = [part.unsafe_buffer_pointer() for part in pool]
    engine.generate(prompts(5, 9), GREEDY)
    assert [part.unsafe_buffer_pointer() for part in parts()] == before


def test_leaving_a_stream_early_frees_its_slots_and_pages(engine):
    free = engine.free_pages
    stream = engine.stream(prompts(100, 50, 20), GREEDY)
    next(stream)
    assert engine.free_pages < free
    stream.close()
    assert engine.free_pages == free
    assert len(engine.generate(prompts(10), GREEDY)[0].tokens) == 12


def test_a_context_fills_the_cache_to_the_last_token(engine):
    got = engine.generate(prompts(500), SamplingParams(temperature=0, max_tokens=1000))[0]
    # The last of the 512 places is written when the token after it is predicted.
    assert len(got.tokens) == 13 and got.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"prompts\[1\] = \[\]: is empty"),
        ([1] * 512, r"prompts\[1\] = '512 tokens': must be shorter than the cache's 512 tokens"),
        ([5, 100], r"prompts\[1\] = 100: is not a token id; the vocabulary has 100"),
        ([-1], r"prompts\[1\] = -1: is not a token id"),
        ("text", r"prompts\[1\] = 'text': is text, but the engine has no tokenizer"),
    ],
)
def test_bad_prompts_are_refused_before_any_work(engine, prompt, message):
    with pytest.raises(ConfigError, match=message):
        engine.stream([[1, 2], prompt], GREEDY)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"cache_format": "fp3"},
            "cache_format = 'fp3': must be one of 'f32', 'bf16', 'fp8', 'int8', 'fp4', 'nuq4'",
        ),
        ({"max_sequences": 0}, "max_sequences = 0: must be greater than 0"),
        ({"prefill_chunks": (2.5,)}, r"prefill_chunks = \(2.5,\): holds 2.5, which must be a whole number"),
        ({"prefill_chunks": 32}, "prefill_chunks = 32: must be a tuple"),
        ({"max_length": "5"}, "max_length = '5': must be a whole number"),
        ({"max_length": 1}, "max_length = 1: must be at least 2"),
        ({"prefill_chunks": ()}, r"prefill_chunks = \(\): must hold at least one length"),
        ({"max_length": 1024}, "max_length = 1024: must not exceed the model's 512"),
    ],
)
def test_bad_engine_configurations_are_refused(model, fields, message):
    with pytest.raises(ConfigError, match=message):
        Engine(model, config=EngineConfig(**fields))


def test_a_nuq4_cache_takes_the_models_codebooks_and_keeps_them():
    model = init_model(dataclasses.replace(CONFIG, cache_format="nuq4", num_layers=2))
    for layers in (model.dense_layers, model.moe_layers):
        layers.attn.codebook[...] = layers.attn.codebook[...] * 1.5
    config = EngineConfig("nuq4", max_sequences=1, max_length=128, prefill_chunks=(8,), rope_format="fp8")
    engine = Engine(model, config=config)
    want = np.asarray(model.codebooks())
    np.testing.assert_array_equal(engine.cache.codebook, want)
    first = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3))
    assert (
        first[0].tokens == engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3))[0].tokens
    )
    np.testing.assert_array_equal(engine.cache.codebook, want)
    # A state that was lost in a step is made anew, from arrays that no step has consumed.
    np.testing.assert_array_equal(engine._empty_state().cache.codebook, want)
    assert engine.cache.rope_format == "fp8"


def test_prompts_may_be_arrays(engine):
    (prompt,) = prompts(5)
    (want,) = engine.generate([prompt], GREEDY)
    for array in (np.asarray(prompt), jnp.asarray(prompt)):
        assert engine.generate([array], GREEDY)[0].tokens == want.tokens


def test_one_stream_at_a_time(engine):
    stream = engine.stream(prompts(5), GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="already generating: finish or close its other stream first"):
        engine.generate(prompts(9), GREEDY)
    rest = [event.token for event in stream]
    assert len(rest) == GREEDY.max_tokens - 1
    assert engine.generate(prompts(5), GREEDY)[0].tokens[1:] == rest


@pytest.mark.parametrize("step", ["_prefill", "_decode", "_admit", "_release"])
def test_an_exception_between_a_step_and_its_result_leaves_the_engine_usable(engine, monkeypatch, step):
    """As Ctrl-C may come: the step has consumed the state, and nobody took what it returned."""
    want = engine.generate(prompts(5, 40), GREEDY)
    free = engine.free_pages
    compiled = getattr(engine, step)

    def interrupted(*args):
        compiled(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts(5, 40), GREEDY)
    assert engine.free_pages == free
    got = engine.generate(prompts(5, 40), GREEDY)
    assert [c.tokens for c in got] == [c.tokens for c in want]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1.7, 2.2], r"prompts\[0\] = 1.7: is not a token id: ids are whole numbers"),
        (None, r"prompts\[0\] = None: must be text or a list of token ids"),
    ],
)
def test_prompts_that_are_no_prompts(engine, prompt, message):
    with pytest.raises(ConfigError, match=message):
        engine.generate([prompt], GREEDY)
