"""Llama, Mistral, Qwen2 and Qwen3 checkpoints, in and out: configuration, parameter names and layouts.

One decoder with grouped-query attention and a SwiGLU MLP, with what tells the families apart: Qwen2 adds a bias to
queries, keys and values, Qwen3 normalises queries and keys head by head. The names are those of the released files
and of transformers; rope rotates the halves of a head. SmolLM2 is a Llama.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mlaflax.config import ConfigError, GQAConfig, ModelConfig, require
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

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# Keys of a config.json that change nothing in the forward pass (or repeat another key).
# fmt: off
_INERT = frozenset([
    "_name_or_path", "architectures", "attn_implementation", "attention_dropout", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "is_llama_config", "label2id", "max_window_layers",
    "model_type", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "return_dict",
    "tokenizer_class", "torch_dtype", "transformers.js_config", "transformers_version", "use_cache",
])
# fmt: on
_ROPES = ("default", "yarn", "llama3")
_STACK = "dense_layers"


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` that computes what a `config.json` of one of `ARCHITECTURES` describes.

    Rope may be given as `rope_parameters` (transformers 5) or as `rope_theta` and `rope_scaling` (the released
    files). Activations are float32; replace `dtype` to serve in bfloat16.

    Raises:
      ConfigError: on another architecture, a missing or unknown key, or a value not supported here: a sliding window
        that is shorter than the context, biases elsewhere than Qwen2 has them, other rope scalings.
    """
    kind = _kind(config)
    key = Keys(config, "config.json")
    key.only("hidden_act", "silu")
    key.only("mlp_bias", False)
    key.only("attention_bias", False)
    key.only("rope_interleaved", False)
    heads, width, max_length = (
        key("num_attention_heads"),
        key("hidden_size"),
        key("max_position_embeddings"),
    )
    _require_full_attention(key, kind, max_length)
    head_dim = key("head_dim", None)
    if head_dim is None:
        require(kind != "qwen3", "head_dim", None, "must be given for Qwen3")
        require(
            width % heads == 0, "hidden_size", width, f"must be a multiple of num_attention_heads ({heads})"
        )
        head_dim = width // heads
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for name in ("mscale", "mscale_all_dim"):
        require(not given.get(name), name, given.get(name), "must be absent: only DeepSeek models have it")
    values: dict[str, Any] = {
        "vocab_size": key("vocab_size"),
        "num_layers": key("num_hidden_layers"),
        "hidden_size": width,
        "mlp_size": key("intermediate_size"),
        "max_length": max_length,
        "attention": GQAConfig(
            num_heads=heads,
            num_kv_heads=key("num_key_value_heads", heads) if kind == "llama" else key("num_key_value_heads"),
            head_dim=head_dim,
            rope=rope_from_hf(key, "half", _ROPES),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
        ),
        "norm_eps": float(key("rms_norm_eps", 1e-6)),
        "tie_embeddings": key("tie_word_embeddings", False),
        "init_std": float(key("initializer_range", 0.02)),
    }
    key.close(_INERT)
    return ModelConfig(**values)


def model_config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` with which transformers computes what `config` describes.

    Norms of queries and keys make it a Qwen3, biases a Qwen2, neither a Llama.

    Raises:
      ConfigError: if none of these can express `config`.
    """
    a = require_expressible(config)
    even = config.hidden_size % a.num_heads == 0
    require(
        even, "hidden_size", config.hidden_size, f"must be a multiple of attention.num_heads ({a.num_heads})"
    )
    name = "Qwen3" if a.qk_norm else "Qwen2" if a.qkv_bias else "Llama"
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "max_position_embeddings": config.max_length,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        # These families know no mscale: a factor of the tables says the same.
        "rope_parameters": {k: v for k, v in rope_to_hf(a.rope).items() if not k.startswith("mscale")},
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "dtype": "float32",
        **({} if a.qkv_bias else {"attention_bias": False}),
    }


def params_from_hf(state_dict: Mapping[str, np.ndarray], config: ModelConfig) -> Params:
    """Rename, unfold and stack the weights.

    Args:
      state_dict: the tensors of the weight files under their names there, float32, float64, bfloat16 or float16;
        each is asked for once. Rope buffers are left out.
      config: from `model_config_from_hf`.

    Returns:
      Nested dict of float32 arrays in the names and shapes of docs/design.md.

    Raises:
      ConfigError: on a missing, unknown or misshapen tensor, or a number format that needs scales.
    """
    require_expressible(config)
    reader = Reader(state_dict)
    flat = {rule.ours: reader.read(rule, rule.theirs) for rule in top_rules(config)}
    for rule in _layer_rules(config):
        layers = [reader.read_layer(rule, layer) for layer in range(config.num_layers)]
        flat[f"{_STACK}.{rule.ours}"] = np.stack(layers)
    if config.tie_embeddings:
        reader.drop_tied("lm_head.weight", flat["embed"])
    reader.close(config.num_layers)
    return nest(flat)


def params_to_hf(params: Mapping[str, Any], config: ModelConfig) -> dict[str, np.ndarray]:
    """The inverse of `params_from_hf`: float32 tensors under the names and layouts of the released files.

    Written as safetensors beside the config.json of `model_config_to_hf`, they load in transformers.

    Raises:
      ConfigError: if no family can express the model, or on a missing, unknown or misshapen parameter.
    """
    rules = _layer_rules(config)
    flat = {k: np.asarray(v) for k, v in check_shapes(flatten(params), shapes(config)).items()}
    out = {rule.theirs: rule.fold(flat[rule.ours]) for rule in top_rules(config)}
    for rule in rules:
        for layer, value in enumerate(flat[f"{_STACK}.{rule.ours}"]):
            (name,) = rule.names(layer)
            out[name] = rule.fold(value)
    return out


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


def _require_full_attention(key: Keys, kind: str, max_length: int) -> None:
    """Refuse windows that hide a token of a sequence that the model may serve."""
    window = key("sliding_window", None)
    used = key("use_sliding_window", kind == "mistral")
    key("max_window_layers", None)
    for layer, name in enumerate(key("layer_types", ())):
        require(name == "full_attention", f"layer_types[{layer}]", name, "must be 'full_attention'")
    require(
        not used or window is None or window >= max_length,
        "sliding_window",
        window,
        f"must be absent or at least max_position_embeddings ({max_length}): windows are not supported",
    )


def require_expressible(config: ModelConfig) -> GQAConfig:
    """The attention of a model that one of these families can express; else `ConfigError`."""
    a = config.attention
    if not isinstance(a, GQAConfig):
        raise ConfigError(f"attention = {a!r}: must be a GQAConfig in a model of the Llama families")
    experts = config.num_moe_layers
    require(not experts, "moe.num_experts", config.moe.num_experts, "must be 0 in the Llama families")
    half = a.rope.convention
    require(half == "half", "attention.rope.convention", half, "must be 'half' in the Llama families")
    scores = a.rope.mscale_all_dim
    require(not scores, "attention.rope.mscale_all_dim", scores, "must be 0 in the Llama families")
    require(not (a.qk_norm and a.qkv_bias), "attention.qkv_bias", True, "must be False beside qk_norm")
    return a


def stacks(config: ModelConfig) -> Iterator[tuple[str, range, list[Rule]]]:
    """Name, layer numbers and rules of the one stack of layers."""
    yield _STACK, range(config.num_layers), _layer_rules(config)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our flat names and shapes."""
    found = {rule.ours: rule.shape for rule in top_rules(config)}
    return found | {f"{_STACK}.{r.ours}": (config.num_layers, *r.shape) for r in _layer_rules(config)}


def _layer_rules(config: ModelConfig) -> list[Rule]:
    a, d = require_expressible(config), config.hidden_size
    query, kv = (a.num_heads, a.head_dim), (a.num_kv_heads, a.head_dim)
    rules = [
        same("attn_norm.scale", "input_layernorm.weight", d),
        same("mlp_norm.scale", "post_attention_layernorm.weight", d),
        linear("attn.q", "self_attn.q_proj.weight", (d,), query),
        linear("attn.k", "self_attn.k_proj.weight", (d,), kv),
        linear("attn.v", "self_attn.v_proj.weight", (d,), kv),
        linear("attn.out", "self_attn.o_proj.weight", query, (d,)),
    ]
    if a.qkv_bias:
        for name, shape in (("q", query), ("k", kv), ("v", kv)):
            size = shape[0] * shape[1]
            rules.append(Rule(f"attn.{name}_bias", f"self_attn.{name}_proj.bias", shape, (size,)))
    if a.qk_norm:
        rules += [
            same("attn.q_norm.scale", "self_attn.q_norm.weight", a.head_dim),
            same("attn.k_norm.scale", "self_attn.k_norm.weight", a.head_dim),
        ]
    return rules + mlp_rules("mlp", "mlp", d, config.mlp_size)


__all__ = [
    "ARCHITECTURES",
    "load_params",
    "model_config_from_hf",
    "model_config_to_hf",
    "params_from_hf",
    "params_to_hf",
    "stacks",
]
