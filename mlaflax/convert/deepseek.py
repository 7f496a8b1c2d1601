"""DeepSeek-V2 and V3 checkpoints, in and out: configuration, parameter names and layouts.

The names are those of the released files and of transformers: one matrix `[out, in]` per projection and
per expert. Ours (docs/design.md) are stacked over layers and experts, `[in, out]`, with the heads unfolded.
Nothing but names and layout changes, so both sides give the same logits; where the original code and
transformers differ, the numbers are those of transformers 5.24:

* V2 (arXiv:2405.04434): softmax scores, a group is worth its best expert, weights are never normalised
  (`norm_topk_prob` is ignored), rope on interleaved pairs.
* V3 (arXiv:2412.19437): sigmoid scores with a selection bias, a group is worth its best two experts, rope on
  interleaved pairs unless `rope_interleave` is false.
* The norms of both latents use an epsilon of 1e-6, whatever `rms_norm_eps` says.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mlaflax.config import AttentionConfig, ConfigError, ModelConfig, MoEConfig, require
from mlaflax.convert.layout import (
    Keys,
    Params,
    Reader,
    Rule,
    check_shapes,
    flatten,
    linear,
    load_params,
    mlp_rules,
    nest,
    rope_from_hf,
    rope_to_hf,
    same,
    top_rules,
)

ARCHITECTURES = {"DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3"}

# Keys of a config.json that change nothing in the forward pass (or repeat another key).
# fmt: off
_INERT = frozenset([
    "_name_or_path", "architectures", "attn_implementation", "attention_dropout", "auto_map",
    "aux_loss_alpha", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "ep_size",
    "head_dim", "id2label", "label2id", "model_type", "num_mtp_layers", "num_nextn_predict_layers",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "qk_head_dim", "quantization_config", "return_dict", "seq_aux", "tokenizer_class", "torch_dtype",
    "transformers_version", "use_cache",
])
# fmt: on


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` that computes what a DeepSeek-V2 or V3 `config.json` describes.

    Rope may be given as `rope_parameters` (transformers 5) or as `rope_theta` and `rope_scaling` (the
    released files). Losses and the training of the bias are not described there: V3 keeps the default
    `bias_step`. The prediction modules of V3 (`num_nextn_predict_layers`) are left out. Activations are
    float32; replace `dtype` to serve in bfloat16.

    Raises:
      ConfigError: on another architecture, a missing or unknown key, or a value not supported here.
    """
    kind = _kind(config)
    v3 = kind == "deepseek_v3"
    key = Keys(config, "config.json")
    key.only("hidden_act", "silu")
    key.only("attention_bias", False)
    key.only("mlp_bias", False)
    key.only("moe_layer_freq", 1)
    key.only("scoring_func", "sigmoid" if v3 else "softmax")
    heads, num_layers = key("num_attention_heads"), key("num_hidden_layers")
    key.only("num_key_value_heads", heads)
    moe = _moe_from_hf(key, v3)
    interleaved = key("rope_interleave", True) if v3 else True
    values: dict[str, Any] = {
        "vocab_size": key("vocab_size"),
        "num_layers": num_layers,
        "hidden_size": key("hidden_size"),
        "mlp_size": key("intermediate_size"),
        "max_length": key("max_position_embeddings"),
        "attention": AttentionConfig(
            num_heads=heads,
            q_lora_rank=key("q_lora_rank", 0),
            kv_lora_rank=key("kv_lora_rank"),
            qk_nope_head_dim=key("qk_nope_head_dim"),
            qk_rope_head_dim=key("qk_rope_head_dim"),
            v_head_dim=key("v_head_dim"),
            rope=rope_from_hf(key, "interleaved" if interleaved else "half"),
        ),
        "moe": moe if moe.first_dense < num_layers else MoEConfig(),
        "norm_eps": key("rms_norm_eps"),
        "tie_embeddings": key("tie_word_embeddings", False),
        "init_std": key("initializer_range", 0.02),
    }
    key.close(_INERT)
    return ModelConfig(**values)


def model_config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` with which transformers computes what `config` describes.

    Softmax scores make it a DeepSeek-V2, everything else a V3; a model without experts is a V3 whose layers
    are all dense.

    Raises:
      ConfigError: if neither family can express `config`.
    """
    a, m, dense = config.latent_attention, config.moe, not config.num_moe_layers
    v2 = is_v2(config)
    require_expressible(config)
    values: dict[str, Any] = {
        "architectures": ["DeepseekV2ForCausalLM" if v2 else "DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v2" if v2 else "deepseek_v3",
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "max_position_embeddings": config.max_length,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_heads,
        "q_lora_rank": a.q_lora_rank or None,
        "kv_lora_rank": a.kv_lora_rank,
        "qk_nope_head_dim": a.qk_nope_head_dim,
        "qk_rope_head_dim": a.qk_rope_head_dim,
        "v_head_dim": a.v_head_dim,
        "rope_parameters": rope_to_hf(a.rope),
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "first_k_dense_replace": config.num_dense_layers,
        "n_routed_experts": 1 if dense else m.num_experts,
        "n_shared_experts": 1 if dense else m.num_shared_experts,
        "num_experts_per_tok": 1 if dense else m.top_k,
        "moe_intermediate_size": 1 if dense else m.expert_size,
        "routed_scaling_factor": 1.0 if dense else m.routed_scale,
        "n_group": 1 if dense else m.num_groups,
        "topk_group": 1 if dense else m.top_groups,
        "norm_topk_prob": not dense and m.normalize,
        "dtype": "float32",
    }
    if v2:
        values["topk_method"] = "group_limited_greedy" if m.num_groups > 1 else "greedy"
    else:
        values["rope_interleave"] = a.rope.convention == "interleaved"
        values["num_nextn_predict_layers"] = 0
    return values


def params_from_hf(state_dict: Mapping[str, np.ndarray], config: ModelConfig) -> Params:
    """Rename, unfold and stack DeepSeek weights.

    Args:
      state_dict: the tensors of the weight files under their names there, float32, float64, bfloat16 or
        float16. Rope buffers and the prediction modules of V3 (`model.layers.N`, N at or above `num_layers`)
        are left out.
      config: from `model_config_from_hf`.

    Returns:
      Nested dict of float32 arrays in the names and shapes of docs/design.md, `moe.bias` included (0 in V2).

    Raises:
      ConfigError: on a missing, unknown or misshapen tensor, or a number format that needs scales (FP8).
    """
    reader = Reader(state_dict)
    flat: dict[str, np.ndarray] = {}
    for rule in top_rules(config):
        flat[rule.ours] = reader.read(rule, rule.theirs)
    for stack, layers, rules in stacks(config):
        for rule in rules:
            flat[f"{stack}.{rule.ours}"] = np.stack([reader.read_layer(rule, i) for i in layers])
        kv_up = flat.pop(f"{stack}.attn.kv_up")
        nope = config.latent_attention.qk_nope_head_dim
        flat[f"{stack}.attn.k_up"] = np.ascontiguousarray(kv_up[:, :, :nope])
        flat[f"{stack}.attn.v_up"] = np.ascontiguousarray(kv_up[:, :, nope:])
    if is_v2(config):
        flat["moe_layers.moe.bias"] = np.zeros((config.num_moe_layers, config.moe.num_experts), np.float32)
    if config.tie_embeddings:
        reader.drop_tied("lm_head.weight", flat["embed"])
    reader.close(config.num_layers)
    return nest(flat)


def params_to_hf(params: Mapping[str, Any], config: ModelConfig) -> dict[str, np.ndarray]:
    """The inverse of `params_from_hf`: float32 tensors under the names and layouts of the DeepSeek files.

    Written as safetensors beside the config.json of `model_config_to_hf`, they load in transformers.

    Raises:
      ConfigError: if neither family can express the model, or on a missing, unknown or misshapen parameter.
    """
    require_expressible(config)
    flat = {k: np.asarray(v) for k, v in check_shapes(flatten(params), shapes(config)).items()}
    require_no_bias_in_v2(flat, config)
    out = {}
    for rule in top_rules(config):
        out[rule.theirs] = rule.fold(flat[rule.ours])
    for stack, layers, rules in stacks(config):
        k_up, v_up = flat[f"{stack}.attn.k_up"], flat[f"{stack}.attn.v_up"]
        flat[f"{stack}.attn.kv_up"] = np.concatenate([k_up, v_up], axis=2)
        for rule in rules:
            for row, layer in enumerate(layers):
                value = flat[f"{stack}.{rule.ours}"][row]
                for name, part in zip(rule.names(layer), value if rule.experts else [value], strict=True):
                    out[name] = rule.fold(part)
    return out | {name: np.zeros(shape, np.float32) for name, shape in empty_tensors(config).items()}


# Configuration


def _kind(config: Mapping[str, Any]) -> str:
    architectures, kind = config.get("architectures"), config.get("model_type")
    if architectures:
        kind = next((ARCHITECTURES[a] for a in architectures if a in ARCHITECTURES), None)
    if kind not in ARCHITECTURES.values():
        raise ConfigError(
            f"architectures = {architectures!r}, model_type = {config.get('model_type')!r}: "
            f"must be one of {', '.join(ARCHITECTURES)}"
        )
    return str(kind)


def require_expressible(config: ModelConfig) -> None:
    """Raise `ConfigError` unless one of the two families computes what `config` describes."""
    a, m = config.latent_attention, config.moe
    require(a.rope.scaling == "yarn", "attention.rope.scaling", a.rope.scaling, "must be 'yarn'")
    require(a.latent_norm_eps == 1e-6, "attention.latent_norm_eps", a.latent_norm_eps, "must be 1e-6")
    if not config.num_moe_layers:
        return
    grouped = m.num_groups > 1
    if is_v2(config):
        where = "with softmax scores (DeepSeek-V2)"
        half = a.rope.convention == "half"
        require(not half, "attention.rope.convention", "half", f"must be 'interleaved' {where}")
        require(not m.normalize, "moe.normalize", m.normalize, f"must be False {where}")
        max_ok = not grouped or m.group_score == "max"
        require(max_ok, "moe.group_score", m.group_score, f"must be 'max' {where}")
    else:
        require(m.score == "sigmoid", "moe.score", m.score, "must be 'softmax' or 'sigmoid'")
        top2_ok = not grouped or m.group_score == "top2"
        require(top2_ok, "moe.group_score", m.group_score, "must be 'top2' with sigmoid scores (DeepSeek-V3)")


def _moe_from_hf(key: Keys, v3: bool) -> MoEConfig:
    key("norm_topk_prob", None)
    experts = key("n_routed_experts", 0)
    groups, top_groups = key("n_group", 1), key("topk_group", 1)
    if v3:
        key.only("topk_method", "noaux_tc")
    else:
        key.only("topk_method", "greedy", "group_limited_greedy")
        if key("topk_method", "greedy") == "greedy":
            groups = top_groups = 1
    moe: dict[str, Any] = {
        "num_experts": experts,
        "num_shared_experts": key("n_shared_experts", 0),
        "top_k": key("num_experts_per_tok", 1),
        "expert_size": key("moe_intermediate_size", 0),
        "first_dense": key("first_k_dense_replace", 0),
        "routed_scale": float(key("routed_scaling_factor", 1.0)),
        "num_groups": groups,
        "top_groups": top_groups,
    }
    if not experts:
        return MoEConfig()
    if v3:
        return MoEConfig(**moe, group_score="top2", score="sigmoid", normalize=key("norm_topk_prob", True))
    return MoEConfig(**moe, group_score="max", score="softmax", normalize=False, bias_step=0.0)


def empty_tensors(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Tensors without elements that transformers misses in a file that lacks them.

    It has shared experts of width 0 where there are none.
    """
    if not config.num_moe_layers or config.moe.num_shared_experts:
        return {}
    d = config.hidden_size
    return {
        f"model.layers.{layer}.mlp.shared_experts.{name}.weight": shape
        for layer in range(config.num_dense_layers, config.num_layers)
        for name, shape in (("gate_proj", (0, d)), ("up_proj", (0, d)), ("down_proj", (d, 0)))
    }


def require_no_bias_in_v2(flat: Mapping[str, Any], config: ModelConfig) -> None:
    """Refuse what training may have given a model that the files have no place for."""
    if is_v2(config) and np.asarray(flat["moe_layers.moe.bias"]).any():
        raise ConfigError("moe_layers.moe.bias is not 0, and DeepSeek-V2 has no selection bias")


def is_v2(config: ModelConfig) -> bool:
    """Whether the files are a DeepSeek-V2's, which have no selection bias."""
    return config.num_moe_layers > 0 and config.moe.score == "softmax"


# Names and layouts


def stacks(config: ModelConfig) -> Iterator[tuple[str, range, list[Rule]]]:
    """Name, layer numbers and rules of each stack of layers that exists."""
    a, m, d = config.latent_attention, config.moe, config.hidden_size
    dense, depth = config.num_dense_layers, config.num_layers
    h, c, r = a.num_heads, a.kv_lora_rank, a.qk_rope_head_dim
    query, nope_v = (h, a.qk_head_dim), a.qk_nope_head_dim + a.v_head_dim
    if a.q_lora_rank:
        q_rules = [
            linear("attn.q_down", "self_attn.q_a_proj.weight", (d,), (a.q_lora_rank,)),
            same("attn.q_norm.scale", "self_attn.q_a_layernorm.weight", a.q_lora_rank),
            linear("attn.q_up", "self_attn.q_b_proj.weight", (a.q_lora_rank,), query),
        ]
    else:
        q_rules = [linear("attn.q", "self_attn.q_proj.weight", (d,), query)]
    attention = [
        same("attn_norm.scale", "input_layernorm.weight", d),
        same("mlp_norm.scale", "post_attention_layernorm.weight", d),
        *q_rules,
        linear("attn.kv_down", "self_attn.kv_a_proj_with_mqa.weight", (d,), (c + r,)),
        same("attn.kv_norm.scale", "self_attn.kv_a_layernorm.weight", c),
        # One matrix there, [nope | v] in each head; split into k_up and v_up here.
        Rule("attn.kv_up", "self_attn.kv_b_proj.weight", (h, nope_v, c), (h * nope_v, c)),
        linear("attn.out", "self_attn.o_proj.weight", (h, a.v_head_dim), (d,)),
    ]

    if dense:
        yield "dense_layers", range(dense), attention + mlp_rules("mlp", "mlp", d, config.mlp_size)
    if dense < depth:
        e = m.num_experts
        moe = [linear("moe.router", "mlp.gate.weight", (d,), (e,))]
        if not is_v2(config):
            moe.append(same("moe.bias", "mlp.gate.e_score_correction_bias", e))
        moe += mlp_rules("moe", "mlp.experts.{e}", d, m.expert_size, e)
        if m.num_shared_experts:
            moe += mlp_rules("moe.shared", "mlp.shared_experts", d, m.num_shared_experts * m.expert_size)
        yield "moe_layers", range(dense, depth), attention + moe


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our flat names and shapes."""
    found = {rule.ours: rule.stacked_shape for rule in top_rules(config)}
    for stack, layers, rules in stacks(config):
        found |= {f"{stack}.{rule.ours}": (len(layers), *rule.stacked_shape) for rule in rules}
        count, heads, nope_v, latent = found.pop(f"{stack}.attn.kv_up")
        nope = config.latent_attention.qk_nope_head_dim
        found[f"{stack}.attn.k_up"] = (count, heads, nope, latent)
        found[f"{stack}.attn.v_up"] = (count, heads, nope_v - nope, latent)
    if config.num_moe_layers:
        found["moe_layers.moe.bias"] = (config.num_moe_layers, config.moe.num_experts)
    return found


__all__ = [
    "ARCHITECTURES",
    "load_params",
    "model_config_from_hf",
    "model_config_to_hf",
    "params_from_hf",
    "params_to_hf",
]
