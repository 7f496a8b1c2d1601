"""Grouped matrix products over experts."""

from mlaflax.ops.grouped_matmul.api import Implementation, grouped_matmul, grouped_swiglu

__all__ = ["Implementation", "grouped_matmul", "grouped_swiglu"]
