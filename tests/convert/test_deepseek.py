"""Names, layouts and refusals of the DeepSeek converter; tests/parity says that the numbers are right."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaflax.config import AttentionConfig, ConfigError, ModelConfig, MoEConfig, RopeConfig
from mlaflax.convert.deepseek import (
    load_params,
    model_config_from_hf,
    model_config_to_hf,
    params_from_hf,
    params_to_hf,
)
from mlaflax.model.transformer import Transformer
from tests.parity import golden

# The config.json of DeepSeek-V2-Lite and DeepSeek-V3 as released, in the form transformers 4 reads.
V2_LITE = json.loads("""{
  "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001,
  "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
  "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512,
  "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
  "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false,
  "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
  "pretraining_tp": 1, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
  "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
  "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": true, "tie_word_embeddings": false,
  "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16", "transformers_version": "4.33.1",
  "use_cache": true, "v_head_dim": 128, "vocab_size": 102400}""")
V3 = V2_LITE | json.loads("""{
  "architectures": ["DeepseekV3ForCausalLM"], "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168,
  "intermediate_size": 18432, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "n_group": 8,
  "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
  "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
  "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "quantization_config": {"quant_method": "fp8"},
  "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
  "original_max_position_embeddings": 4096, "type": "yarn"}, "routed_scaling_factor": 2.5,
  "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "vocab_size": 129280}""")


def small(name):
    file = golden.load(name)
    return file, model_config_from_hf(file.config)


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a.dtype == b.dtype and np.array_equal(a, b)


def test_released_v2_lite():
    config = model_config_from_hf(V2_LITE)
    assert config == ModelConfig(
        vocab_size=102400, num_layers=27, hidden_size=2048, mlp_size=10944, max_length=163840,
        attention=AttentionConfig(
            num_heads=16, q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
            v_head_dim=128,
            rope=RopeConfig(factor=40.0, original_length=4096, mscale=0.707, mscale_all_dim=0.707),
        ),
        moe=MoEConfig(
            num_experts=64, num_shared_experts=2, top_k=6, expert_size=1408, first_dense=1,
            group_score="max", score="softmax", normalize=False, routed_scale=1.0, bias_step=0.0,
        ),
        tie_embeddings=False,
    )  # fmt: skip


def test_released_v3():
    config = model_config_from_hf(V3)
    assert config.attention.q_lora_rank == 1536 and config.attention.num_heads == 128
    assert config.num_dense_layers == 3 and config.num_moe_layers == 58
    assert config.moe == MoEConfig(
        num_experts=256, num_shared_experts=1, top_k=8, expert_size=2048, first_dense=3, num_groups=8,
        top_groups=4, group_score="top2", score="sigmoid", normalize=True, routed_scale=2.5,
    )  # fmt: skip


def test_number_of_parameters_is_the_published_one():
    """671 B in DeepSeek-V3 without its prediction module, 15.7 B in V2-Lite (arXiv:2412.19437, 2405.04434)."""
    for hf_config, published in ((V3, 671e9), (V2_LITE, 15.7e9)):
        config = model_config_from_hf(hf_config)
        state = nnx.state(nnx.eval_shape(lambda c=config: Transformer(c, rngs=nnx.Rngs(0))), nnx.Param)
        total = sum(int(np.prod(v.get_value().shape)) for _, v in nnx.to_flat_state(state))
        assert abs(total / published - 1) < 1e-3


@settings(deadline=None)
@given(
    st.builds(
        RopeConfig,
        theta=st.sampled_from([1e4, 5e5]),
        convention=st.sampled_from(["interleaved", "half"]),
        factor=st.sampled_from([1.5, 40.0]),
        original_length=st.integers(1, 4096),
        mscale=st.floats(0, 2, width=16),
        mscale_all_dim=st.floats(0, 2, width=16),
    ),
    st.booleans(),
    st.integers(0, 2),
)
def test_configuration_survives_the_round_trip(rope, tie, dense):
    """To rounding: where transformers wants the ratio of both mscales, ours is solved for."""
    config = ModelConfig(
        num_layers=2,
        attention=AttentionConfig(rope=rope),
        tie_embeddings=tie,
        moe=MoEConfig()
        if dense == 2
        else dataclasses.replace(model_config_from_hf(V3).moe, first_dense=dense),
    )
    back = model_config_from_hf(json.loads(json.dumps(model_config_to_hf(config))))
    assert back.attention.rope.mscale == pytest.approx(rope.mscale, abs=1e-9)
    rope = dataclasses.replace(back.attention.rope, mscale=rope.mscale)
    back = dataclasses.replace(back, attention=dataclasses.replace(back.attention, rope=rope))
    assert back == config


@pytest.mark.parametrize("name", golden.CONFIGS)
def test_weights_survive_the_round_trip(name):
    file, config = small(name)
    weights = file.weights()
    back = params_to_hf(params_from_hf(weights, config), config)
    assert same(weights, back)


def test_no_shared_experts():
    file, config = small("v3")
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, num_shared_experts=0))
    weights = {k: v for k, v in file.weights().items() if "shared_experts" not in k}
    params = params_from_hf(weights, config)
    assert "shared" not in params["moe_layers"]["moe"]
    written = params_to_hf(params, config)
    empty = {k: v.size for k, v in written.items() if k not in weights}
    assert len(empty) == 6 and not any(empty.values())
    assert same(params_from_hf(written, config), params)


@pytest.mark.parametrize("name", golden.CONFIGS)
def test_params_are_what_the_model_holds(name):
    file, config = small(name)
    params = params_from_hf(file.weights(), config)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    load_params(model, params)
    held = nnx.to_pure_dict(nnx.state(model))
    assert same(params, {k: _numpy(v) for k, v in held.items()})


def _numpy(tree):
    return {k: _numpy(v) for k, v in tree.items()} if isinstance(tree, dict) else np.asarray(tree)


def test_bfloat16_weights_are_widened():
    file, config = small("v2_lite")
    weights = {k: v.astype(ml_dtypes.bfloat16) for k, v in file.weights().items()}
    params = params_from_hf(weights, config)
    assert params["embed"].dtype == np.float32
    assert np.array_equal(params["embed"], weights["model.embed_tokens.weight"].astype(np.float32))


def test_prediction_modules_and_rope_buffers_are_left_out():
    file, config = small("v3")
    weights = file.weights()
    expected = params_from_hf(weights, config)
    weights["model.layers.4.eh_proj.weight"] = np.zeros((128, 256), np.float32)
    weights["model.layers.4.self_attn.o_proj.weight"] = np.zeros((128, 128), np.float32)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    assert same(params_from_hf(weights, config), expected)


def test_tied_head():
    file, config = small("v2")
    config = dataclasses.replace(config, tie_embeddings=True)
    weights = file.weights()
    with pytest.raises(ConfigError, match=r"^lm_head.weight differs from the embedding"):
        params_from_hf(weights, config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    assert "head" not in params_from_hf(weights, config)
    del weights["lm_head.weight"]
    assert "head" not in params_from_hf(weights, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*must be one of DeepseekV2ForCausalLM"),
        ({"architectures": None, "model_type": "deepseek_v32"}, "deepseek_v32"),
        ({"index_topk": 2048}, "unknown keys, which might change the numbers: index_topk"),
        ({"kv_lora_rank": None}, "config.json lacks 'kv_lora_rank'"),
        ({"attention_bias": True}, "attention_bias = True: must be False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid': must be 'softmax'"),
        ({"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"num_key_value_heads": 4}, "num_key_value_heads = 4: must be 16"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "low_freq_factor": 1}}, "rope_scaling has unknown keys"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling lacks 'factor'"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        model_config_from_hf(V2_LITE | change)


def _without(weights, name):
    del weights[name]


NORM = "model.layers.1.self_attn.kv_a_layernorm.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda w: _without(w, NORM), rf"^the weights lack {NORM}, shape \(64,\)$"),
        (lambda w: w.update({NORM: np.ones(65, np.float32)}), rf"{NORM} has shape \(65,\): .* \(64,\)$"),
        (lambda w: w.update({NORM: np.ones(64, np.int8)}), rf"^{NORM} is int8: must be float32"),
        (lambda w: w.update({NORM + "_scale_inv": np.ones(1)}), f"does not know: {NORM}_scale_inv$"),
        (lambda w: w.update({"model.layers.4.mlp.gate.weight": np.ones(1)}), "does not know: model.layers.4"),
    ],
)
def test_weights_that_are_refused(damage, message):
    file, config = small("v2")
    weights = file.weights()
    damage(weights)
    with pytest.raises(ConfigError, match=message):
        params_from_hf(weights, config)


def test_params_that_are_refused():
    file, config = small("v2")
    params = params_from_hf(file.weights(), config)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ConfigError, match=r"^parameters are missing: embed$"):
        load_params(model, {k: v for k, v in params.items() if k != "embed"})
    with pytest.raises(ConfigError, match=r"^parameters are unknown to the model: extra$"):
        load_params(model, params | {"extra": params["embed"]})
    with pytest.raises(
        ConfigError, match=r"^parameter embed has shape \(159, 128\): the model's is \(160, 128\)$"
    ):
        load_params(model, params | {"embed": params["embed"][1:]})
    params["moe_layers"]["moe"]["bias"] += 1
    with pytest.raises(ConfigError, match="DeepSeek-V2 has no selection bias"):
        params_to_hf(params, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "sqrt_softplus"}, "moe.score = 'sqrt_softplus'"),
        ({"group_score": "max"}, "moe.group_score = 'max': must be 'top2'"),
        ({"score": "softmax", "group_score": "max"}, "moe.normalize = True: must be False"),
    ],
)
def test_models_that_no_family_expresses(change, message):
    config = model_config_from_hf(V3)
    with pytest.raises(ConfigError, match=message):
        model_config_to_hf(dataclasses.replace(config, moe=dataclasses.replace(config.moe, **change)))
