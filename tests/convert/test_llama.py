"""Names, layouts and refusals of the Llama families' converter; tests/parity says that the numbers are right."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from mlaflax.config import AttentionConfig, ConfigError, GQAConfig, ModelConfig, MoEConfig, RopeConfig
from mlaflax.convert.llama import (
    model_config_from_hf,
    model_config_to_hf,
    params_from_hf,
    params_to_hf,
)

# The config.json of the released models, in the form transformers 4 reads.
SMOLLM2 = json.loads("""{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
  "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
  "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
  "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
  "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
  "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true,
  "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "transformers_version": "4.42.3",
  "vocab_size": 49152}""")
LLAMA31 = json.loads("""{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 128000,
  "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
  "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 128256}""")
QWEN2 = json.loads("""{
  "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
  "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2",
  "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true, "use_mrope": null,
  "use_sliding_window": false, "vocab_size": 151936}""")
QWEN3 = json.loads("""{
  "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "head_dim": 128, "hidden_act": "silu",
  "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
  "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
  "tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151936}""")
MISTRAL = json.loads("""{
  "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
  "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
  "tie_word_embeddings": false, "vocab_size": 32768}""")
FAMILIES = {"smollm2": SMOLLM2, "llama3.1": LLAMA31, "qwen2": QWEN2, "qwen3": QWEN3, "mistral": MISTRAL}


def half(theta, **scaling):
    return RopeConfig(theta=theta, convention="half", **scaling)


@pytest.mark.parametrize(
    ("family", "attention", "sizes"),
    [
        ("smollm2", GQAConfig(9, 3, 64, half(1e5)), (49152, 30, 576, 1536, 8192, 1e-5, True)),
        (
            "llama3.1",
            GQAConfig(
                32, 8, 128, half(5e5, factor=8.0, original_length=8192, beta_fast=4.0, scaling="llama3")
            ),
            (128256, 32, 4096, 14336, 131072, 1e-5, False),
        ),
        ("qwen2", GQAConfig(14, 2, 64, half(1e6), qkv_bias=True), (151936, 24, 896, 4864, 32768, 1e-6, True)),
        (
            "qwen3",
            GQAConfig(16, 8, 128, half(1e6), qk_norm=True),
            (151936, 28, 1024, 3072, 40960, 1e-6, True),
        ),
        ("mistral", GQAConfig(32, 8, 128, half(1e6)), (32768, 32, 4096, 14336, 32768, 1e-5, False)),
    ],
)
def test_released_configurations(family, attention, sizes):
    config = model_config_from_hf(FAMILIES[family])
    assert config.attention == attention
    names = (
        "vocab_size",
        "num_layers",
        "hidden_size",
        "mlp_size",
        "max_length",
        "norm_eps",
        "tie_embeddings",
    )
    assert tuple(getattr(config, name) for name in names) == sizes
    # Written out and read again it is the same, whatever transformers calls it then.
    assert model_config_from_hf(model_config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("smollm2", {"architectures": ["MixtralForCausalLM"]}, "architectures = .*must be one of LlamaForCausalLM"),
        ("smollm2", {"hidden_act": "gelu"}, "hidden_act = 'gelu': must be 'silu'"),
        ("smollm2", {"attention_bias": True}, "attention_bias = True: must be False"),
        ("smollm2", {"num_attention_heads": 10}, r"hidden_size = 576: must be a multiple of num_attention_heads"),
        ("smollm2", {"num_key_value_heads": 2}, "attention.num_kv_heads = 2: must divide num_heads"),
        ("smollm2", {"new_knob": 1}, "config.json has unknown keys, .*: new_knob"),
        ("smollm2", {"vocab_size": None}, "config.json lacks 'vocab_size'"),
        ("smollm2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear': must be 'default'"),
        (
            "smollm2",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim = 1.0: must be absent",
        ),
        ("mistral", {"sliding_window": 4096}, "sliding_window = 4096: must be absent or at least .*32768"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "sliding_window = 8: must be absent"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types\[1\] = 'sliding"),
        ("qwen3", {"head_dim": None}, "head_dim = None: must be given for Qwen3"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(family, change, message):
    with pytest.raises(ConfigError, match=message):
        model_config_from_hf(FAMILIES[family] | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": AttentionConfig()}, "attention = AttentionConfig.*must be a GQAConfig"),
        (
            {"attention": GQAConfig(rope=RopeConfig())},
            "attention.rope.convention = 'interleaved': must be 'half'",
        ),
        ({"attention": GQAConfig(qk_norm=True, qkv_bias=True)}, "attention.qkv_bias = True: must be False"),
        ({"moe": MoEConfig(num_experts=2, expert_size=8)}, "moe.num_experts = 2: must be 0"),
    ],
)
def test_models_of_no_family_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        model_config_to_hf(dataclasses.replace(ModelConfig(attention=GQAConfig()), **change))


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a.dtype == b.dtype and np.array_equal(a, b)


def small(family, *, vocab=40, width=24):
    """A configuration of that family, small, and weights with the names and shapes of its files."""
    sizes = {"vocab_size": vocab, "num_hidden_layers": 2, "hidden_size": width, "intermediate_size": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    hf = FAMILIES[family] | sizes
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    if not hf["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, width)
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        for name, out in (("q", 32), ("k", 16), ("v", 16)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (out, width)
            if family == "qwen2":
                shapes[f"{at}self_attn.{name}_proj.bias"] = (out,)
        if family == "qwen3":
            shapes |= {f"{at}self_attn.{name}_norm.weight": (8,) for name in "qk"}
        shapes[f"{at}self_attn.o_proj.weight"] = (width, 32)
        shapes |= {f"{at}mlp.{name}_proj.weight": (32, width) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (width, 32)
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return model_config_from_hf(hf), weights


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_go_in_and_out_unchanged(family):
    config, weights = small(family)
    params = params_from_hf(weights, config)
    back = params_to_hf(params, config)
    assert back.keys() == weights.keys()
    assert all(np.array_equal(back[name], weights[name]) for name in weights)
    q = weights["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(params["dense_layers"]["attn"]["q"][1][:, 3, 5], q[3 * 8 + 5])


def test_narrow_floats_are_read():
    config, weights = small("qwen3")
    narrow = {name: value.astype(ml_dtypes.bfloat16) for name, value in weights.items()}
    got = params_from_hf(narrow, config)["final_norm"]["scale"]
    np.testing.assert_array_equal(got, narrow["model.norm.weight"].astype(np.float32))


BIAS = "model.layers.1.self_attn.k_proj.bias"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda w: w.pop(BIAS), rf"^the weights lack {BIAS}, shape \(16,\)$"),
        (lambda w: w.update({BIAS: np.ones(17, np.float32)}), rf"{BIAS} has shape \(17,\): .* \(16,\)$"),
        (lambda w: w.update({BIAS: np.ones(16, np.int8)}), f"^{BIAS} is int8: must be float32"),
        (
            lambda w: w.update({"model.layers.2.mlp.up_proj.weight": np.ones(1)}),
            "does not know: model.layers.2",
        ),
        (
            lambda w: w.update({"lm_head.weight": np.ones((40, 24))}),
            "lm_head.weight differs from the embedding",
        ),
    ],
)
def test_weights_that_are_refused(damage, message):
    config, weights = small("qwen2")
    damage(weights)
    with pytest.raises(ConfigError, match=message):
        params_from_hf(weights, config)
