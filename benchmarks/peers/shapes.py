"""The models that are compared, their Hugging Face configurations, and what one step must move and compute.

Standard library only, and nothing of mlaflax at import: peers' environments import it too. Functions that
take a `ModelConfig` read its attributes.
"""

from typing import Any

# Both have 106.3 million parameters: where GQA's attention is smaller, its MLP is wider.
GQA = {
    "vocab_size": 32_000,
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2272,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def mla_config():
    """The `ModelConfig` of the decode comparison: dense MLA, latent 256 + rope 32, no q_lora."""
    from mlaflax.config import AttentionConfig, ModelConfig

    attention = AttentionConfig(
        num_heads=12, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
    )
    return ModelConfig(
        vocab_size=32_000,
        num_layers=12,
        hidden_size=768,
        mlp_size=2048,
        max_length=32_768,
        attention=attention,
    )


def deepseek_v3(config: Any) -> dict[str, Any]:
    """A mlaflax `ModelConfig` as the fields of Hugging Face's `DeepseekV3Config` (and of its config.json).

    Raises:
      ValueError: when DeepseekV3 has no equal of a setting, naming it.
    """
    a, m, rope = config.attention, config.moe, config.attention.rope
    moe = m.num_experts > 0
    for known, field, value in (
        (rope.convention == "interleaved", "attention.rope.convention", rope.convention),
        (not moe or m.score == "sigmoid", "moe.score", m.score),
        (not moe or m.num_groups == 1 or m.group_score == "top2", "moe.group_score", m.group_score),
        (not moe or m.num_shared_experts > 0, "moe.num_shared_experts", m.num_shared_experts),
    ):
        if not known:
            raise ValueError(f"{field} = {value!r} has no equal in transformers' DeepseekV3")
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.factor > 1:
        parameters |= {
            "rope_type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_length,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
        }
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_heads,
        "q_lora_rank": a.q_lora_rank or None,
        "kv_lora_rank": a.kv_lora_rank,
        "qk_nope_head_dim": a.qk_nope_head_dim,
        "qk_rope_head_dim": a.qk_rope_head_dim,
        "v_head_dim": a.v_head_dim,
        "first_k_dense_replace": config.num_dense_layers,
        # Without experts the fields below are not used, but the class wants them to be sound.
        "n_routed_experts": m.num_experts if moe else 2,
        "num_experts_per_tok": m.top_k,
        "moe_intermediate_size": m.expert_size if moe else 32,
        "n_shared_experts": m.num_shared_experts if moe else 1,
        "n_group": m.num_groups,
        "topk_group": m.top_groups,
        "norm_topk_prob": m.normalize,
        "routed_scaling_factor": m.routed_scale,
        "max_position_embeddings": config.max_length,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": parameters,
        "rope_interleave": True,
        "num_mtp_layers": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def attention_parameters(hf: dict) -> int:
    """Weights of one MLA attention, norms left out."""
    d, h, c, r = hf["hidden_size"], hf["num_attention_heads"], hf["kv_lora_rank"], hf["qk_rope_head_dim"]
    n, v, lora = hf["qk_nope_head_dim"], hf["v_head_dim"], hf["q_lora_rank"]
    q = d * lora + lora * h * (n + r) if lora else d * h * (n + r)
    return q + d * (c + r) + c * h * (n + v) + h * v * d


def step_parameters(hf: dict) -> int:
    """Weights one token of a dense model is multiplied with: the head, but not the embedding look-up."""
    d = hf["hidden_size"]
    layer = attention_parameters(hf) + 3 * d * hf["intermediate_size"]
    return hf["num_hidden_layers"] * layer + hf["vocab_size"] * d


def decode_floor(hf: dict, context: int, batch: int, itemsize: int) -> tuple[int, int]:
    """(bytes, FLOPs) of one decode step of a dense MLA model, weights and cache of `itemsize` bytes.

    Every weight and every cached latent is read once; attention is in its absorbed form, where each head's
    query (c + r wide) meets each latent and its probabilities meet the latent's c dims.
    """
    layers, heads = hf["num_hidden_layers"], hf["num_attention_heads"]
    c, r = hf["kv_lora_rank"], hf["qk_rope_head_dim"]
    weights = step_parameters(hf)
    moved = itemsize * (weights + batch * context * layers * (c + r))
    flops = 2 * batch * (weights + context * layers * heads * (2 * c + r))
    return moved, flops
