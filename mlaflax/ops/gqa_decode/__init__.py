"""Grouped-query attention over a paged pool of keys and values."""

from mlaflax.ops.gqa_decode.api import gqa_decode

__all__ = ["gqa_decode"]
