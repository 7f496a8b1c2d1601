"""Causal attention within segments, for training and for prefill without a cache."""

from mlaflax.ops.attention.api import attention

__all__ = ["attention"]
