"""Causal attention within segments, for training and for prefill without a cache."""

from mlaflax.ops.attention.api import attention
from mlaflax.ops.attention.tiered import tiered_attention

__all__ = ["attention", "tiered_attention"]
