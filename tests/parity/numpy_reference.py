"""The model in plain NumPy float64: slow, naive, and short enough to check against the papers by eye.

MLA is DeepSeek-V2 (arXiv:2405.04434) section 2.1, grouped-query attention arXiv:2305.13245, YaRN
arXiv:2309.00071 in the DeepSeek form, the mixture of experts arXiv:2412.19437 section 2.1.2. It reads the
parameters of docs/design.md and shares no code with
the library but the configuration.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from mlaflax.config import AttentionConfig, GQAConfig, ModelConfig, MoEConfig, RopeConfig


@dataclasses.dataclass
class Trace:
    """What a forward pass saw, for judging whether a comparison is worth anything.

    Attributes:
      attention: per layer, probabilities `[b, h, q, k]`.
      margin: the smallest gap between the last selected and the first rejected expert (or group): where it
        is near the rounding error, two right implementations may choose differently.
      negative: share of the selected experts whose biased score is negative.
    """

    attention: list[np.ndarray] = dataclasses.field(default_factory=list)
    margin: float = math.inf
    negative: list[float] = dataclasses.field(default_factory=list)


def forward(
    params: dict[str, Any],
    config: ModelConfig,
    tokens: np.ndarray,
    positions: np.ndarray | None = None,
    segment_ids: np.ndarray | None = None,
    trace: Trace | None = None,
) -> np.ndarray:
    """Logits, float64 `[b, q, w]`, of integer tokens, positions and segment ids `[b, q]` (0: padding)."""
    b, q = tokens.shape
    trace = trace or Trace()
    positions = np.broadcast_to(np.arange(q), (b, q)) if positions is None else positions
    segment_ids = np.ones((b, q), int) if segment_ids is None else segment_ids
    order = np.arange(q)
    visible = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (order[:, None] >= order) & (
        segment_ids[:, :, None] > 0
    )  # fmt: skip
    x = params["embed"].astype(np.float64)[tokens]
    for layer in range(config.num_layers):
        dense = layer < config.num_dense_layers
        stack = params["dense_layers" if dense else "moe_layers"]
        p = _at(stack, layer if dense else layer - config.num_dense_layers)
        y = rms_norm(x, p["attn_norm"]["scale"], config.norm_eps)
        a = config.attention
        if isinstance(a, GQAConfig):
            x = x + attend_grouped(p["attn"], a, config.norm_eps, y, positions, visible, trace)
        else:
            x = x + attend(p["attn"], a, y, positions, visible, trace)
        y = rms_norm(x, p["mlp_norm"]["scale"], config.norm_eps)
        x = x + (swiglu(p["mlp"], y) if dense else mixture(p["moe"], config.moe, y, segment_ids > 0, trace))
    x = rms_norm(x, params["final_norm"]["scale"], config.norm_eps)
    return x @ (params["embed"].T if config.tie_embeddings else params["head"]).astype(np.float64)


def rms_norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def swiglu(p, x):
    gate = x @ p["gate"]
    return (gate / (1 + np.exp(-gate)) * (x @ p["up"])) @ p["down"]


def temperature(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def softmax_scale(a: AttentionConfig) -> float:
    return temperature(a.rope.factor, a.rope.mscale_all_dim) ** 2 / math.sqrt(
        a.qk_nope_head_dim + a.qk_rope_head_dim
    )


def rotate(x, positions, rope: RopeConfig):
    """x `[b, q, ..., r]`: multiply each pair, as a complex number, by m exp(i position frequency)."""
    r = x.shape[-1]
    pair = np.arange(r // 2)
    frequency = rope.theta ** (-2 * pair / r)
    if rope.factor > 1 and rope.scaling == "llama3":
        # Pairs that turn often are kept, those that turn seldom slowed, as the released code of Llama 3.1 does it.
        length = 2 * math.pi / frequency
        smooth = (rope.original_length / length - rope.beta_slow) / (rope.beta_fast - rope.beta_slow)
        between = (1 - smooth) * frequency / rope.factor + smooth * frequency
        slowed = np.where(length > rope.original_length / rope.beta_slow, frequency / rope.factor, between)
        frequency = np.where(length < rope.original_length / rope.beta_fast, frequency, slowed)
    elif rope.factor > 1:
        # The pair that turns `turns` times within the original length.
        low, high = (
            r * math.log(rope.original_length / (2 * math.pi * turns)) / (2 * math.log(rope.theta))
            for turns in (rope.beta_fast, rope.beta_slow)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), r - 1)
        slow = np.clip((pair - low) / (high - low or 1e-3), 0, 1)
        frequency = frequency * (1 - slow) + frequency / rope.factor * slow
    m = temperature(rope.factor, rope.mscale) / temperature(rope.factor, rope.mscale_all_dim)
    m = 1.0 if rope.scaling == "llama3" else m
    turn = m * np.exp(1j * positions[..., None] * frequency)
    turn = turn.reshape(*turn.shape[:2], *[1] * (x.ndim - 3), r // 2)
    if rope.convention == "interleaved":
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack([z.real, z.imag], -1).reshape(x.shape)
    z = (x[..., : r // 2] + 1j * x[..., r // 2 :]) * turn
    return np.concatenate([z.real, z.imag], -1)


def attend(p, a: AttentionConfig, x, positions, visible, trace: Trace):
    n, c = a.qk_nope_head_dim, a.kv_lora_rank
    if a.q_lora_rank:
        latent_q = rms_norm(x @ p["q_down"], p["q_norm"]["scale"], a.latent_norm_eps)
        q = np.einsum("bql,lhx->bqhx", latent_q, p["q_up"])
    else:
        q = np.einsum("bqd,dhx->bqhx", x, p["q"])
    down = x @ p["kv_down"]
    latent = rms_norm(down[..., :c], p["kv_norm"]["scale"], a.latent_norm_eps)
    k_rope = rotate(down[..., c:], positions, a.rope)
    q_rope = rotate(q[..., n:], positions, a.rope)
    k = np.einsum("bkc,hnc->bkhn", latent, p["k_up"])
    v = np.einsum("bkc,hvc->bkhv", latent, p["v_up"])
    scores = np.einsum("bqhn,bkhn->bhqk", q[..., :n], k) + np.einsum("bqhr,bkr->bhqk", q_rope, k_rope)
    probs = softmax(scores * softmax_scale(a), visible)
    trace.attention.append(probs)
    return np.einsum("bhqk,bkhv,hvd->bqd", probs, v, p["out"], optimize=True)


def attend_grouped(p, a: GQAConfig, eps: float, x, positions, visible, trace: Trace):
    """Grouped-query attention (arXiv:2305.13245): query head i reads KV head i // (heads per KV head)."""
    q, k, v = (np.einsum("bqd,dhn->bqhn", x, p[name]) + p.get(f"{name}_bias", 0) for name in "qkv")
    if a.qk_norm:
        q, k = rms_norm(q, p["q_norm"]["scale"], eps), rms_norm(k, p["k_norm"]["scale"], eps)
    q, k = rotate(q, positions, a.rope), rotate(k, positions, a.rope)
    k, v = (np.repeat(y, a.num_heads // a.num_kv_heads, axis=2) for y in (k, v))
    scores = np.einsum("bqhn,bkhn->bhqk", q, k) / math.sqrt(a.head_dim)
    probs = softmax(scores, visible)
    trace.attention.append(probs)
    return np.einsum("bhqk,bkhn,hnd->bqd", probs, v, p["out"], optimize=True)


def softmax(scores, visible):
    """Over the last axis of `[b, h, q, k]`; what sees nothing gets zeros."""
    scores = np.where(visible[:, None], scores, -np.inf)
    top = np.where(visible.any(-1), 0, 1)[:, None, :, None] + scores.max(-1, keepdims=True, initial=-1e9)
    probs = np.exp(scores - top)
    return probs / np.maximum(probs.sum(-1, keepdims=True), 1e-300)


def select(m: MoEConfig, scores, bias, trace: Trace):
    """Experts `[tokens, k]` by scores `[tokens, e]`."""
    biased = scores + bias
    groups = biased.reshape(len(scores), m.num_groups, -1)
    if m.num_groups > 1:
        worth = groups.max(-1) if m.group_score == "max" else np.sort(groups, -1)[..., -2:].sum(-1)
        groups = np.where(best(worth, m.top_groups, trace)[..., None], groups, -np.inf)
    eligible = groups.reshape(scores.shape)
    chosen = best(eligible, m.top_k, trace)
    trace.negative.append(float((biased[chosen] < 0).mean()))
    return chosen


def best(values, count: int, trace: Trace):
    """Which of the last axis are among its `count` largest."""
    ordered = -np.sort(-values, -1)
    if count < values.shape[-1]:
        trace.margin = min(trace.margin, (ordered[:, count - 1] - ordered[:, count]).min())
    return values >= ordered[:, count - 1 : count]


def mixture(p, m: MoEConfig, x, valid, trace: Trace):
    tokens = x[valid]
    logits = tokens @ p["router"]
    if m.score == "softmax":
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores = scores / scores.sum(-1, keepdims=True)
    elif m.score == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.sqrt(np.logaddexp(logits, 0))
    weights = np.where(select(m, scores, p["bias"], trace), scores, 0)
    if m.normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    out = swiglu(p["shared"], x) if m.num_shared_experts else np.zeros_like(x)
    # Every expert on every token: most of it is multiplied by 0, and nothing can be misplaced.
    for e in range(m.num_experts):
        expert = {name: p[name][e] for name in ("gate", "up", "down")}
        out[valid] += m.routed_scale * weights[:, e : e + 1] * swiglu(expert, tokens)
    return out


def _at(stack, layer: int) -> Any:
    """One layer of stacked parameters, in float64."""
    if isinstance(stack, dict):
        return {name: _at(value, layer) for name, value in stack.items()}
    return np.asarray(stack[layer], np.float64)
