"""The Llama families against transformers as it runs here: training graph, cache in chunks, and the engine.

`make parity`; needs the parity extra.
"""

import importlib

import numpy as np
import pytest

from mlaflax.convert.llama import (
    model_config_from_hf,
    model_config_to_hf,
    params_from_hf,
    params_to_hf,
)
from mlaflax.decode import Engine, EngineConfig, SamplingParams
from tests.parity import numpy_reference
from tests.parity.golden import make_documents, make_weights
from tests.parity.runner import Runner, build
from tests.parity.test_live import LENGTHS, TOLERANCE, compare, compare_generation

pytestmark = pytest.mark.parity

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 120,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1280,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def _family(name, rope, **changes):
    rope = {"rope_type": "default", "rope_theta": 1e4} | rope
    named = {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower(), "rope_parameters": rope}
    return _COMMON | named | changes


# Two of three documents go beyond the original length of each scaled rope.
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SCALED = {"original_max_position_embeddings": 32}
FAMILIES = {
    "llama": _family("Llama", {}),
    "llama 3.1": _family("Llama", _LLAMA3 | _SCALED, head_dim=20, rms_norm_eps=1e-5),
    "smollm2": _family(
        "Llama", {"rope_theta": 1e5}, tie_word_embeddings=True, num_key_value_heads=1, num_attention_heads=3,
        hidden_size=48,
    ),
    "mistral": _family("Mistral", {}, head_dim=24, num_key_value_heads=4, sliding_window=None),
    "qwen2": _family("Qwen2", {"rope_type": "yarn", "factor": 4.0} | _SCALED, use_sliding_window=False),
    "qwen3": _family("Qwen3", {"rope_theta": 1e6}, head_dim=32, tie_word_embeddings=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def peer():
    return importlib.import_module("tests.parity.transformers_peer")


def weights_for(peer, hf_config, seed=5):
    weights = make_weights(peer.shapes(hf_config), seed)
    for name in weights:
        if name.endswith("q_norm.weight"):  # attention as peaked as the other families have it
            weights[name] *= 2.5
    return weights


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_generation(family, peer):
    hf_config = FAMILIES[family]
    config = model_config_from_hf(hf_config)
    weights, documents = weights_for(peer, hf_config), make_documents(5, 96, LENGTHS)
    model = peer.load_model(hf_config, weights)
    params = params_from_hf(weights, config)
    runner = Runner(build(config, params), optimised=True)
    compare(model, runner, peer, documents)
    compare_generation(model, runner, peer, documents[2])
    trace = numpy_reference.Trace()
    numpy_reference.forward(params, config, documents[0][None], trace=trace)
    # Uniform attention over 40 keys and more would give 0.025 at most.
    assert max(a.max(-1)[..., 40:].mean() for a in trace.attention) > 0.15


@pytest.mark.parametrize("family", ["llama 3.1", "qwen2", "qwen3"])
def test_the_engine_generates_what_transformers_does(family, peer):
    hf_config = FAMILIES[family]
    config = model_config_from_hf(hf_config)
    weights, (prompt, *_) = weights_for(peer, hf_config), make_documents(5, 96, LENGTHS)
    model = peer.load_model(hf_config, weights)
    engine = Engine(
        build(config, params_from_hf(weights, config)),
        config=EngineConfig("f32", max_sequences=2, max_length=256, prefill_chunks=(16, 64)),
    )
    theirs = peer.generate(model, prompt, 40)
    whole = np.concatenate([prompt, theirs])
    forced = peer.alone(model, whole)[len(prompt) - 1 : -1].astype(np.float64)
    logprobs = forced - np.log(np.exp(forced).sum(-1, keepdims=True))
    got = engine.generate([prompt, prompt[:20]], SamplingParams(temperature=0, max_tokens=40))[0]
    top = np.sort(forced, -1)
    tied = np.flatnonzero(top[:, -1] - top[:, -2] < 2 * TOLERANCE)
    until = tied[0] if len(tied) else 40
    assert until >= 10, "the prompt ties too early to tell anything"
    assert got.tokens[:until] == theirs[:until].tolist()
    np.testing.assert_allclose(got.logprobs[:until], logprobs.max(-1)[:until], atol=TOLERANCE)


@pytest.mark.parametrize("family", ["llama 3.1", "qwen2", "qwen3"])
def test_what_is_written_out_loads_in_transformers(family, peer):
    hf_config = FAMILIES[family]
    config = model_config_from_hf(hf_config)
    params = params_from_hf(weights_for(peer, hf_config), config)
    model = peer.load_model(model_config_to_hf(config), params_to_hf(params, config))
    (document, *_) = make_documents(6, 96, LENGTHS)
    want = numpy_reference.forward(params, config, document[None])[0]
    assert np.abs(peer.alone(model, document) - want).max() < TOLERANCE
