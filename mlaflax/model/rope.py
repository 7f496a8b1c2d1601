"""Rotary position embedding (arXiv:2104.09864), scaled by YaRN (arXiv:2309.00071, DeepSeek's form) or as Llama 3.1."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mlaflax.config import AttentionConfig, GQAConfig, RopeConfig


def mscale(factor: float, weight: float) -> float:
    """YaRN's temperature 0.1 * weight * ln(factor) + 1; 1 without scaling."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def softmax_scale(config: AttentionConfig | GQAConfig) -> float:
    """1 / sqrt(dims of a head's query), times YaRN's temperature of all dims for the query and again for the key."""
    rope = config.rope
    m = mscale(rope.factor, rope.mscale_all_dim) if rope.mscale_all_dim and rope.scaling == "yarn" else 1.0
    return config.qk_head_dim**-0.5 * m * m


def inverse_frequencies(config: RopeConfig, rope_dim: int) -> Float[np.ndarray, " r/2"]:
    """Radians per position of each rotated pair, float32.

    YaRN keeps the pairs that turn more than `beta_fast` times within `original_length`, slows those
    that turn less than `beta_slow` times by `factor`, and blends linearly between. `llama3` does the same, but
    blends by turns rather than by pairs.
    """
    plain = config.theta ** (-np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim)
    if config.factor <= 1:
        return plain.astype(np.float32)

    if config.scaling == "llama3":
        turns = config.original_length * plain / (2 * math.pi)
        keep = np.clip((turns - config.beta_slow) / (config.beta_fast - config.beta_slow), 0, 1)
        return (plain * keep + plain / config.factor * (1 - keep)).astype(np.float32)

    def pair_of(turns: float) -> float:
        """The (fractional) pair that turns `turns` times within the original length."""
        return (
            rope_dim * math.log(config.original_length / (turns * 2 * math.pi)) / (2 * math.log(config.theta))
        )

    low = max(math.floor(pair_of(config.beta_fast)), 0)
    high = min(math.ceil(pair_of(config.beta_slow)), rope_dim - 1)
    ramp = np.clip((np.arange(rope_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return (plain * (1 - ramp) + plain / config.factor * ramp).astype(np.float32)


def rope_tables(
    config: RopeConfig, rope_dim: int, positions: Int[Array, "b q"]
) -> tuple[Float[Array, "b q r/2"], Float[Array, "b q r/2"]]:
    """Cosine and sine per position and pair, float32."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config, rope_dim)
    if config.scaling == "llama3":
        return jnp.cos(angles), jnp.sin(angles)
    m = mscale(config.factor, config.mscale)
    if config.mscale_all_dim:
        m /= mscale(config.factor, config.mscale_all_dim)
    return jnp.cos(angles) * m, jnp.sin(angles) * m


def apply_rope(
    x: Float[Array, "b q *h r"], cos: Float[Array, "b q r/2"], sin: Float[Array, "b q r/2"], convention: str
) -> Float[Array, "b q *h r"]:
    """Rotate the pairs of the last axis by their angles, computed and returned in float32."""
    x = x.astype(jnp.float32)
    if x.ndim == cos.ndim + 1:
        cos, sin = cos[:, :, None], sin[:, :, None]
    if convention == "interleaved":
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
