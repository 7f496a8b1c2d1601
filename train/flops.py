"""Parameters and floating-point operations of a model, counted from its configuration."""

from typing import NamedTuple

import jax

from mlaflax.config import AttentionConfig, GQAConfig, ModelConfig

# Peak dense bfloat16 FLOP/s of one jax device, by the start of its `device_kind`; vendors' data sheets.
_PEAKS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


class Counts(NamedTuple):
    """Parameters: all of them, and those that one token is multiplied with.

    The embedding is a table that a token reads one row of; it is active only where it is the head as well.
    """

    total: int
    active: int


def count_parameters(config: ModelConfig) -> Counts:
    """Parameters of the model that `config` describes, without making it."""
    d, w = config.hidden_size, config.vocab_size
    attention = _attention_matrices(config) + _attention_vectors(config.attention)
    dense = config.num_dense_layers * (attention + 2 * d + 3 * d * config.mlp_size)
    moe = config.moe
    expert = 3 * d * moe.expert_size
    always = attention + 2 * d + d * moe.num_experts + moe.num_shared_experts * expert
    head = w * d + d
    embedding = 0 if config.tie_embeddings else w * d
    layers = config.num_moe_layers
    return Counts(
        head + embedding + dense + layers * (always + moe.num_experts * expert),
        head + dense + layers * (always + moe.top_k * expert),
    )


def training_flops(config: ModelConfig, length: int) -> float:
    """FLOPs per token of a forward and backward pass over sequences of `length`, recomputation not counted.

    Two per multiply-add; the backward pass costs twice the forward. A query attends to half the keys.
    """
    d, a, moe = config.hidden_size, config.attention, config.moe
    attention = _attention_matrices(config) + a.num_heads * (a.qk_head_dim + a.v_head_dim) * (length + 1) / 2
    dense = config.num_dense_layers * 3 * d * config.mlp_size
    experts = d * moe.num_experts + 3 * d * moe.expert_size * (moe.top_k + moe.num_shared_experts)
    macs = config.num_layers * attention + dense + config.num_moe_layers * experts + d * config.vocab_size
    return 3 * 2 * macs


def peak_flops() -> float | None:
    """Peak FLOP/s of all devices together, or None where it is not known."""
    kind = jax.devices()[0].device_kind
    known = next((peak for name, peak in _PEAKS.items() if kind.startswith(name)), None)
    return known and known * jax.device_count()


def _attention_vectors(a: AttentionConfig | GQAConfig) -> int:
    """Weights of the norms and biases inside attention."""
    if isinstance(a, GQAConfig):
        biases = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim if a.qkv_bias else 0
        return biases + (2 * a.head_dim if a.qk_norm else 0)
    return a.q_lora_rank + a.kv_lora_rank


def _attention_matrices(config: ModelConfig) -> int:
    d, a = config.hidden_size, config.attention
    if isinstance(a, GQAConfig):
        return 2 * d * (a.num_heads + a.num_kv_heads) * a.head_dim
    queries = a.num_heads * a.qk_head_dim
    query = d * a.q_lora_rank + a.q_lora_rank * queries if a.q_lora_rank else d * queries
    latent = d * (a.kv_lora_rank + a.qk_rope_head_dim)
    expanded = a.kv_lora_rank * a.num_heads * (a.qk_nope_head_dim + a.v_head_dim)
    return query + latent + expanded + a.num_heads * a.v_head_dim * d
