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

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from mlaflax.config import AttentionConfig, ConfigError, ModelConfig, MoEConfig, RopeConfig, require
from mlaflax.model.mla import Codebook

Params = dict[str, Any]

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
_ROPE_INERT = frozenset({"type", "rope_type", "rope_theta"})


class _Keys:
    """Reads a dict key by key and knows what is left; None counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = {k: v for k, v in values.items() if v is not None}
        self.where = where
        self.seen: set[str] = set()

    def __call__(self, name: str, *default: Any) -> Any:
        self.seen.add(name)
        if name in self.values:
            return self.values[name]
        if default:
            return default[0]
        raise ConfigError(f"{self.where} lacks {name!r}")

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse any value but those that the model here computes; the first is what absence means."""
        value = self(name, allowed[0])
        require(
            value in allowed,
            name,
            value,
            f"must be {' or '.join(map(repr, allowed))}: nothing else is supported",
        )

    def close(self, inert: frozenset[str]) -> None:
        unknown = sorted(set(self.values) - self.seen - inert)
        if unknown:
            raise ConfigError(
                f"{self.where} has unknown keys, which might change the numbers: {', '.join(unknown)}"
            )


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
    key = _Keys(config, "config.json")
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
            rope=_rope_from_hf(key, "interleaved" if interleaved else "half"),
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
    a, m, dense = config.attention, config.moe, not config.num_moe_layers
    v2 = _is_v2(config)
    _require_expressible(config)
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
        "rope_parameters": _rope_to_hf(a.rope),
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
    reader = _Reader(state_dict)
    flat: dict[str, np.ndarray] = {}
    for rule in _top_rules(config):
        flat[rule.ours] = reader.read(rule, rule.theirs)
    for stack, layers, rules in _stacks(config):
        for rule in rules:
            flat[f"{stack}.{rule.ours}"] = np.stack([reader.read_layer(rule, i) for i in layers])
        kv_up = flat.pop(f"{stack}.attn.kv_up")
        nope = config.attention.qk_nope_head_dim
        flat[f"{stack}.attn.k_up"] = np.ascontiguousarray(kv_up[:, :, :nope])
        flat[f"{stack}.attn.v_up"] = np.ascontiguousarray(kv_up[:, :, nope:])
    if _is_v2(config):
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
    flat = flatten(params)
    return {tensor.name: tensor.read() for tensor in tensors_to_hf(flat, config)}


class HFTensor(NamedTuple):
    """A tensor of the files: float32 of `shape`, made when `read` is called."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def tensors_to_hf(flat: Mapping[str, Any], config: ModelConfig) -> Iterator[HFTensor]:
    """The tensors of the DeepSeek files, layer by layer; each is made when it is read.

    Args:
      flat: our parameters (arrays of jax or numpy, `moe_layers.moe.bias` included) by flat name.

    Raises:
      ConfigError: if neither family can express the model, or on a missing, unknown or misshapen parameter.
    """
    _require_expressible(config)
    flat = _check(flat, _shapes(config))
    if _is_v2(config) and np.asarray(flat["moe_layers.moe.bias"]).any():
        raise ConfigError("moe_layers.moe.bias is not 0, and DeepSeek-V2 has no selection bias")
    return _tensors(flat, config)


def _tensors(flat: Mapping[str, Any], config: ModelConfig) -> Iterator[HFTensor]:
    def tensor(rule: _Rule, name: str, ours: str, index: tuple[int, ...]) -> HFTensor:
        def read() -> np.ndarray:
            if ours.endswith("attn.kv_up"):
                halves = (flat[ours.replace("kv_up", half)][index] for half in ("k_up", "v_up"))
                return rule.fold(np.concatenate([np.asarray(half) for half in halves], axis=1))
            return rule.fold(np.asarray(flat[ours][index] if index else flat[ours]))

        return HFTensor(name, rule.their_shape, read)

    for rule in _top_rules(config):
        yield tensor(rule, rule.theirs, rule.ours, ())
    for stack, layers, rules in _stacks(config):
        for row, layer in enumerate(layers):
            for rule in rules:
                for expert, name in enumerate(rule.names(layer)):
                    index = (row, expert) if rule.experts else (row,)
                    yield tensor(rule, name, f"{stack}.{rule.ours}", index)
            if stack == "moe_layers" and not config.moe.num_shared_experts:
                # transformers has shared experts of width 0 where there are none, and misses them in the file.
                d = config.hidden_size
                for part, shape in (("gate_proj", (0, d)), ("up_proj", (0, d)), ("down_proj", (d, 0))):
                    name = f"model.layers.{layer}.mlp.shared_experts.{part}.weight"
                    yield HFTensor(name, shape, functools.partial(np.zeros, shape, np.float32))


def load_params(model: nnx.Module, params: Mapping[str, Any]) -> None:
    """Replace every weight of `model`, a stacked `Transformer`, by `params`, in place.

    Each array takes the dtype and the sharding of the one it replaces. The model may be abstract
    (`nnx.eval_shape`): its weights then never existed before.

    Args:
      params: nested dict as `params_from_hf` returns it.

    Raises:
      ConfigError: on a missing, unknown or misshapen parameter; the model is then unchanged.
    """
    variables = {
        ".".join(map(str, path)): variable
        for path, variable in nnx.to_flat_state(nnx.state(model))
        if not isinstance(variable, nnx.RngState | Codebook)  # what no such file holds
    }
    old = {name: variable.get_value() for name, variable in variables.items()}
    values = _check(flatten(params), {name: tuple(value.shape) for name, value in old.items()})
    new = {k: jax.device_put(v.astype(old[k].dtype), old[k].sharding) for k, v in values.items()}
    nnx.update(model, nest(new))


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


def _temperature(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def _rope_from_hf(key: _Keys, convention: Any) -> RopeConfig:
    old, new = key("rope_scaling", None), key("rope_parameters", None)
    rope = _Keys(new or old or {}, "rope_parameters" if new else "rope_scaling")
    theta = float(key("rope_theta", rope("rope_theta", 10_000.0)))
    kind = rope("rope_type", rope("type", "default"))
    rope.only("partial_rotary_factor", 1.0)
    key.only("partial_rotary_factor", 1.0)
    require(kind in ("default", "yarn"), "rope_type", kind, "must be 'default' or 'yarn'")
    if kind == "default":
        rope.close(_ROPE_INERT)
        return RopeConfig(theta=theta, convention=convention)
    rope.only("truncate", True)
    factor = float(rope("factor"))
    mscale, all_dim = rope("mscale", 0), float(rope("mscale_all_dim", 0))
    table_factor = rope("attention_factor", None)
    original = rope("original_max_position_embeddings", key("max_position_embeddings"))
    fast, slow = rope("beta_fast", None) or 32.0, rope("beta_slow", None) or 1.0
    rope.close(_ROPE_INERT)
    require(factor >= 1, "rope factor", factor, "must be at least 1")
    # Ours multiplies the tables by m(mscale) / m(mscale_all_dim). transformers does so only when both are
    # set, and otherwise by attention_factor or m(1): the mscale that says the same is solved for.
    if factor == 1 or (table_factor is None and mscale and all_dim):
        mscale = float(mscale or 1.0)
        same = table_factor is None or factor > 1 or table_factor == 1
        require(same, "attention_factor", table_factor, "must be 1 where the rope factor is 1")
    elif table_factor is None and not all_dim:
        mscale = 1.0
    else:
        wanted = _temperature(factor, 1) if table_factor is None else table_factor
        solved = (wanted * _temperature(factor, all_dim) - 1) / (0.1 * math.log(factor))
        mscale = float(mscale) if math.isclose(solved, mscale, abs_tol=1e-9) else solved
    return RopeConfig(
        theta=theta,
        convention=convention,
        factor=factor,
        original_length=original,
        beta_fast=float(fast),
        beta_slow=float(slow),
        mscale=mscale,
        mscale_all_dim=all_dim,
    )


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    if rope.factor == 1:
        return {"rope_type": "default", "rope_theta": rope.theta}
    values: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_length,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }
    if not (rope.mscale and rope.mscale_all_dim):
        # transformers derives the tables' factor from these two only where neither is 0.
        tables, scores = (_temperature(rope.factor, x) for x in (rope.mscale, rope.mscale_all_dim))
        values["attention_factor"] = tables / scores
    return values


def _require_expressible(config: ModelConfig) -> None:
    a, m = config.attention, config.moe
    require(a.latent_norm_eps == 1e-6, "attention.latent_norm_eps", a.latent_norm_eps, "must be 1e-6")
    if not config.num_moe_layers:
        return
    grouped = m.num_groups > 1
    if _is_v2(config):
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


def _moe_from_hf(key: _Keys, v3: bool) -> MoEConfig:
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


def _is_v2(config: ModelConfig) -> bool:
    """Whether the files are a DeepSeek-V2's, which have no selection bias."""
    return config.num_moe_layers > 0 and config.moe.score == "softmax"


# Names and layouts


class _Rule(NamedTuple):
    """One parameter: its name and shape here, and its name and shape in the files.

    `transposed` says that ours has its input axes first, where theirs has them last. `experts` above 0 makes
    `theirs` a pattern with one tensor per expert, stacked in ours.
    """

    ours: str
    theirs: str
    shape: tuple[int, ...]
    their_shape: tuple[int, ...]
    transposed: bool = False
    experts: int = 0

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        return (self.experts, *self.shape) if self.experts else self.shape

    def names(self, layer: int) -> Iterator[str]:
        """Their names of this parameter's tensors in one layer, expert by expert."""
        for e in range(max(self.experts, 1)):
            yield f"model.layers.{layer}.{self.theirs.format(e=e)}"

    def piece(self, name: str, index: tuple[int, ...]) -> "Piece":
        if not self.transposed:
            rows, columns = (
                (self.shape[:-1], self.shape[-1:]) if len(self.their_shape) == 2 else (self.shape, ())
            )
            return Piece(name, self.their_shape, index, rows, columns, False)
        # Ours is [*inputs, *outputs]: the inputs are the leading axes that make up their columns.
        cut = next(i for i in range(len(self.shape) + 1) if math.prod(self.shape[:i]) == self.their_shape[1])
        return Piece(name, self.their_shape, index, self.shape[cut:], self.shape[:cut], True)

    def unfold(self, theirs: np.ndarray) -> np.ndarray:
        return (theirs.T if self.transposed else theirs).reshape(self.shape)

    def fold(self, ours: np.ndarray) -> np.ndarray:
        if self.transposed:
            ours = ours.reshape(self.their_shape[::-1]).T
        return np.ascontiguousarray(ours.reshape(self.their_shape), np.float32)


def _same(ours: str, theirs: str, *shape: int) -> _Rule:
    return _Rule(ours, theirs, shape, shape)


def _linear(
    ours: str, theirs: str, inputs: tuple[int, ...], outputs: tuple[int, ...], experts: int = 0
) -> _Rule:
    their_shape = (math.prod(outputs), math.prod(inputs))
    return _Rule(ours, theirs, (*inputs, *outputs), their_shape, True, experts)


def _top_rules(config: ModelConfig) -> list[_Rule]:
    w, d = config.vocab_size, config.hidden_size
    rules = [
        _same("embed", "model.embed_tokens.weight", w, d),
        _same("final_norm.scale", "model.norm.weight", d),
    ]
    return rules if config.tie_embeddings else [*rules, _linear("head", "lm_head.weight", (d,), (w,))]


def _stacks(config: ModelConfig) -> Iterator[tuple[str, range, list[_Rule]]]:
    """Name, layer numbers and rules of each stack of layers that exists."""
    a, m, d = config.attention, config.moe, config.hidden_size
    dense, depth = config.num_dense_layers, config.num_layers
    h, c, r = a.num_heads, a.kv_lora_rank, a.qk_rope_head_dim
    query, nope_v = (h, a.qk_head_dim), a.qk_nope_head_dim + a.v_head_dim
    if a.q_lora_rank:
        q_rules = [
            _linear("attn.q_down", "self_attn.q_a_proj.weight", (d,), (a.q_lora_rank,)),
            _same("attn.q_norm.scale", "self_attn.q_a_layernorm.weight", a.q_lora_rank),
            _linear("attn.q_up", "self_attn.q_b_proj.weight", (a.q_lora_rank,), query),
        ]
    else:
        q_rules = [_linear("attn.q", "self_attn.q_proj.weight", (d,), query)]
    attention = [
        _same("attn_norm.scale", "input_layernorm.weight", d),
        _same("mlp_norm.scale", "post_attention_layernorm.weight", d),
        *q_rules,
        _linear("attn.kv_down", "self_attn.kv_a_proj_with_mqa.weight", (d,), (c + r,)),
        _same("attn.kv_norm.scale", "self_attn.kv_a_layernorm.weight", c),
        # One matrix there, [nope | v] in each head; split into k_up and v_up here.
        _Rule("attn.kv_up", "self_attn.kv_b_proj.weight", (h, nope_v, c), (h * nope_v, c)),
        _linear("attn.out", "self_attn.o_proj.weight", (h, a.v_head_dim), (d,)),
    ]

    def mlp(ours: str, theirs: str, width: int, experts: int = 0) -> list[_Rule]:
        return [
            _linear(f"{ours}.gate", f"{theirs}.gate_proj.weight", (d,), (width,), experts),
            _linear(f"{ours}.up", f"{theirs}.up_proj.weight", (d,), (width,), experts),
            _linear(f"{ours}.down", f"{theirs}.down_proj.weight", (width,), (d,), experts),
        ]

    if dense:
        yield "dense_layers", range(dense), attention + mlp("mlp", "mlp", config.mlp_size)
    if dense < depth:
        e = m.num_experts
        moe = [_linear("moe.router", "mlp.gate.weight", (d,), (e,))]
        if not _is_v2(config):
            moe.append(_same("moe.bias", "mlp.gate.e_score_correction_bias", e))
        moe += mlp("moe", "mlp.experts.{e}", m.expert_size, e)
        if m.num_shared_experts:
            moe += mlp("moe.shared", "mlp.shared_experts", m.num_shared_experts * m.expert_size)
        yield "moe_layers", range(dense, depth), attention + moe


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Our flat names and shapes."""
    shapes = {rule.ours: rule.stacked_shape for rule in _top_rules(config)}
    for stack, layers, rules in _stacks(config):
        shapes |= {f"{stack}.{rule.ours}": (len(layers), *rule.stacked_shape) for rule in rules}
        count, heads, nope_v, latent = shapes.pop(f"{stack}.attn.kv_up")
        nope = config.attention.qk_nope_head_dim
        shapes[f"{stack}.attn.k_up"] = (count, heads, nope, latent)
        shapes[f"{stack}.attn.v_up"] = (count, heads, nope_v - nope, latent)
    if config.num_moe_layers:
        shapes["moe_layers.moe.bias"] = (config.num_moe_layers, config.moe.num_experts)
    return shapes


class Piece(NamedTuple):
    """One tensor of the files as a block of one of our parameters.

    Theirs is a matrix `[prod(rows), prod(columns)]`, or a vector `[prod(rows)]` where `columns` is empty. Ours at
    `index` is `[*columns, *rows]` if `transposed`, else `[*rows, *columns]`, with only `part` (start, stop) of
    the second axis of `rows` where that is given: two of our parameters share such a tensor.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    transposed: bool
    part: tuple[int, int] | None = None


def pieces(config: ModelConfig) -> dict[str, list[Piece]]:
    """Each of our parameters, by its flat name, with the tensors that fill it, in the order of its leading axes.

    V2 has no tensors for `moe_layers.moe.bias`: its list is empty, its values are 0.
    """
    found: dict[str, list[Piece]] = {}

    def add(name: str, rule: _Rule, their_name: str, index: tuple[int, ...]) -> None:
        piece = rule.piece(their_name, index)
        if not name.endswith("attn.kv_up"):
            found.setdefault(name, []).append(piece)
            return
        nope, both = config.attention.qk_nope_head_dim, rule.shape[1]
        for half, part in (("k_up", (0, nope)), ("v_up", (nope, both))):
            found.setdefault(name.replace("kv_up", half), []).append(piece._replace(part=part))

    for rule in _top_rules(config):
        add(rule.ours, rule, rule.theirs, ())
    for stack, layers, rules in _stacks(config):
        for rule in rules:
            for row, layer in enumerate(layers):
                for expert, name in enumerate(rule.names(layer)):
                    add(f"{stack}.{rule.ours}", rule, name, (row, expert) if rule.experts else (row,))
    if config.num_moe_layers:
        found.setdefault("moe_layers.moe.bias", [])
    return found


def left_out_of(names: Iterable[str], num_layers: int) -> dict[str, str]:
    """Those of the files' `names` that no layer here reads, each with the reason in two or three words.

    Layers at or above `num_layers` are prediction modules where one of their tensors is `eh_proj`, which tells
    them from layers that the configuration forgot.
    """
    names = list(names)
    layer_of = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in names}
    predictors = {int(m[1]) for n, m in layer_of.items() if m and ".eh_proj." in n}
    found = {}
    for name, m in layer_of.items():
        if m and int(m[1]) >= num_layers and int(m[1]) in predictors:
            found[name] = "prediction module"
        elif name.endswith(".rotary_emb.inv_freq"):
            found[name] = "rope buffer"
    return found


class _Reader:
    """Takes tensors out of a state dict as float32 and knows what is left."""

    def __init__(self, state_dict: Mapping[str, np.ndarray]):
        self.tensors = state_dict
        self.left = set(state_dict)

    def read(self, rule: _Rule, name: str) -> np.ndarray:
        if name not in self.tensors:
            raise ConfigError(f"the weights lack {name}, shape {rule.their_shape}")
        return rule.unfold(self._take(name, rule.their_shape))

    def read_layer(self, rule: _Rule, layer: int) -> np.ndarray:
        parts = [self.read(rule, name) for name in rule.names(layer)]
        return np.stack(parts) if rule.experts else parts[0]

    def drop_tied(self, name: str, embed: np.ndarray) -> None:
        """Some files repeat a tied head; one that differs would be lost silently."""
        if name in self.left and not np.array_equal(self._take(name, embed.shape), embed):
            raise ConfigError(f"{name} differs from the embedding, but tie_word_embeddings is true")

    def close(self, num_layers: int) -> None:
        ignored = left_out_of(self.left, num_layers)
        unknown = sorted(name for name in self.left if name not in ignored and np.size(self.tensors[name]))
        if unknown:
            raise ConfigError(
                _names("the weights hold tensors that the configuration does not know", unknown)
            )

    def _take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        value = np.asarray(self.tensors[name])
        self.left.discard(name)
        if str(value.dtype) not in ("float32", "float64", "bfloat16", "float16"):
            raise ConfigError(f"{name} is {value.dtype}: must be float32, float64, bfloat16 or float16")
        if value.shape != shape:
            raise ConfigError(f"{name} has shape {value.shape}: the configuration says {shape}")
        return value.astype(np.float32)


def _names(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}: {', '.join(names[:3])}{more}"


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, whose names have dots."""
    flat = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def nest(flat: Mapping[str, Any]) -> Params:
    """Nested dicts of a dict whose names have dots."""
    nested: Params = {}
    for name, value in flat.items():
        *path, leaf = name.split(".")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return nested


def _check(flat: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any]:
    """`flat`, if its names and shapes are exactly `shapes`."""
    if missing := sorted(set(shapes) - set(flat)):
        raise ConfigError(_names("parameters are missing", missing))
    if extra := sorted(set(flat) - set(shapes)):
        raise ConfigError(_names("parameters are unknown to the model", extra))
    for name, value in flat.items():
        if value.shape != shapes[name]:
            raise ConfigError(f"parameter {name} has shape {value.shape}: the model's is {shapes[name]}")
    return flat
