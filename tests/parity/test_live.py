"""The same comparison against transformers as it runs here, over random architectures and their corners.

`make parity`; needs the parity extra. Both directions are tried: weights made for transformers and read by us,
and a model of ours written out and loaded there.
"""

import dataclasses
import importlib
import random

import numpy as np
import pytest

from mlaflax.config import ModelConfig
from mlaflax.convert.deepseek import (
    model_config_from_hf,
    model_config_to_hf,
    params_from_hf,
    params_to_hf,
)
from tests.parity import golden, numpy_reference
from tests.parity.golden import lay_out, make_documents, make_weights
from tests.parity.runner import Runner, build

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
LENGTHS = (90, 50, 17)
SEEDS = range(8)


@pytest.fixture(scope="module")
def peer():
    return importlib.import_module("tests.parity.transformers_peer")


def random_config(seed):
    """A config.json with every choice drawn: family, ranks, groups, rope kind, scales, depth."""
    r = random.Random(seed)
    v3 = seed % 2 == 1
    groups = r.choice([1, 2, 4])
    top_groups = r.randint(1, groups)
    experts = r.choice([8, 16])
    rope_dim = r.choice([8, 16, 32])
    heads = r.choice([2, 4])
    layers = r.randint(1, 4)
    rope = {"rope_type": "default", "rope_theta": r.choice([1e4, 5e5])}
    if r.random() < 0.75:
        rope |= {"rope_type": "yarn", "factor": r.choice([4.0, 40.0]), "original_max_position_embeddings": 32}
        rope |= {"beta_fast": r.choice([16, 32]), "beta_slow": r.choice([1, 2])}
        rope |= r.choice([{}, {"mscale": 0.7, "mscale_all_dim": 1.0}, {"mscale": 1.0, "mscale_all_dim": 0.0}])
    config = {
        "vocab_size": 96,
        "hidden_size": 16 * r.randint(3, 8),
        "intermediate_size": r.choice([80, 200]),
        "moe_intermediate_size": r.choice([24, 40]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": experts,
        "num_experts_per_tok": r.randint(1, top_groups * (experts // groups)),
        "n_shared_experts": r.choice([1, 2]),
        "q_lora_rank": r.choice([None, 24]),
        "kv_lora_rank": r.choice([32, 48]),
        "qk_nope_head_dim": r.choice([16, 24]),
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": r.choice([16, 20]),
        "first_k_dense_replace": r.randint(0, layers),
        "max_position_embeddings": 1280,
        "n_group": groups,
        "topk_group": top_groups,
        "routed_scaling_factor": r.choice([1.0, 2.5]),
        "rms_norm_eps": r.choice([1e-6, 1e-3]),
        "rope_parameters": rope,
        "tie_word_embeddings": r.random() < 0.3,
        "hidden_act": "silu",
    }
    if v3:
        config |= {"rope_interleave": r.random() < 0.7, "norm_topk_prob": r.random() < 0.7}
        return config | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    config["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    return config | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}


def undecided(params, config, documents):
    """Whether rounding could choose another expert somewhere: then two right answers may differ."""
    trace = numpy_reference.Trace()
    for document in documents:
        numpy_reference.forward(params, config, document[None], trace=trace)
    return trace.margin < 2e-5


def weights_for(peer, hf_config, config, seed):
    """Weights and documents of the first seed at which no token stands between two experts."""
    shapes = peer.shapes(hf_config)
    for s in range(1000 * seed, 1000 * seed + 100):
        weights, documents = make_weights(shapes, s), make_documents(s, config.vocab_size, LENGTHS)
        if not undecided(params_from_hf(weights, config), config, documents):
            return weights, documents
    raise AssertionError("every seed has a token between two experts")


def compare(model, runner, peer, documents):
    alone = [peer.alone(model, d) for d in documents]
    errors = {}
    for layout in ("left", "right", "packed"):
        batch = lay_out(documents, layout)
        expected = peer.logits(model, batch, layout)
        live = [expected[at] for _, at in sorted(batch.place, key=lambda p: p[0])]
        errors[layout] = batch.error(runner.logits(batch), alone)
        if layout != "packed":
            errors[f"{layout}, live"] = batch.error(runner.logits(batch), live)
            errors[f"{layout}, cached"] = batch.error(runner.cached_logits(batch), alone)
            errors[f"{layout}, chunks"] = batch.error(runner.cached_logits(batch, [1, 7, 41, 41]), alone)
            errors[f"{layout}, tokens"] = batch.error(runner.cached_logits(batch, [1] * LENGTHS[0]), alone)
    assert max(errors.values()) < TOLERANCE, errors


def compare_generation(model, runner, peer, prompt, count=40):
    """Greedy tokens are the same, and so are the logits of what transformers chose, teacher-forced."""
    theirs = peer.generate(model, prompt, count)
    whole = np.concatenate([prompt, theirs])
    forced = peer.alone(model, whole)[len(prompt) - 1 : -1]
    ours, logits = runner.generate(prompt, count)
    top = np.sort(forced, -1)
    tied = np.flatnonzero(top[:, -1] - top[:, -2] < 2 * TOLERANCE)
    until = tied[0] if len(tied) else count
    assert until >= count // 4, "the prompt ties too early to tell anything"
    assert (ours[:until] == theirs[:until]).all()
    assert np.abs(logits[:until] - forced[:until]).max() < TOLERANCE


@pytest.mark.parametrize("seed", SEEDS)
def test_random_architecture(seed, peer):
    hf_config = random_config(seed)
    config = model_config_from_hf(hf_config)
    weights, documents = weights_for(peer, hf_config, config, seed)
    model = peer.load_model(hf_config, weights)
    runner = Runner(build(config, params_from_hf(weights, config)), optimised=True)
    compare(model, runner, peer, documents)
    compare_generation(model, runner, peer, documents[2])


@pytest.mark.parametrize("name", golden.CONFIGS)
def test_golden_files_are_current(name, peer):
    """The installed transformers still gives what the files say."""
    file = golden.load(name)
    model = peer.load_model(file.config, file.weights())
    for document, expected in zip(file.documents, file.logits, strict=True):
        assert np.abs(peer.alone(model, document) - expected).max() < 2e-5
    assert peer.shapes(file.config) == file.shapes


@pytest.mark.parametrize(
    "rope",
    [
        {"attention_factor": 1.3},
        {"attention_factor": 0.9, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.5},
        {"mscale_all_dim": 0.5},
    ],
    ids=str,
)
def test_odd_rope_temperatures(rope, peer):
    """What transformers does when the two mscales are not both given."""
    hf_config = golden.CONFIGS["v2_lite"]
    hf_config = hf_config | {"rope_parameters": golden._YARN | rope}
    config = model_config_from_hf(hf_config)
    weights, documents = weights_for(peer, hf_config, config, 1)
    model = peer.load_model(hf_config, weights)
    runner = Runner(build(config, params_from_hf(weights, config)))
    batch = lay_out(documents, "right")
    assert batch.error(runner.logits(batch), [peer.alone(model, d) for d in documents]) < TOLERANCE


SMALL = ModelConfig(
    vocab_size=96, num_layers=3, hidden_size=64, mlp_size=160, max_length=640, tie_embeddings=False
)


@pytest.mark.parametrize("kind", ["v2", "v3", "no shared experts", "dense", "dense tied", "mscale alone"])
def test_export(kind, peer):
    """A configuration and weights of ours, written out, mean the same in transformers."""
    config = dataclasses.replace(SMALL, attention=model_config_from_hf(random_config(3)).attention)
    moe = model_config_from_hf(golden.CONFIGS["v2" if kind == "v2" else "v3"]).moe
    rope = config.attention.rope
    if kind == "v2":
        rope = dataclasses.replace(rope, convention="interleaved")
    if kind == "mscale alone":
        rope = dataclasses.replace(rope, factor=8.0, original_length=32, mscale=0.4, mscale_all_dim=0.0)
    if kind == "no shared experts":
        moe = dataclasses.replace(moe, num_shared_experts=0)
    config = dataclasses.replace(
        config,
        attention=dataclasses.replace(config.attention, rope=rope),
        tie_embeddings=kind == "dense tied",
        moe=config.moe if kind.startswith("dense") else moe,
    )
    hf_config = model_config_to_hf(config)
    weights, documents = weights_for(peer, hf_config, config, 2)
    params = params_from_hf(weights, config)
    model = peer.load_model(hf_config, params_to_hf(params, config))
    runner = Runner(build(config, params))
    compare(model, runner, peer, documents)
