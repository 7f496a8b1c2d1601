"""temporary"""

from mlaflax.ops.grouped_matmul.reference import grouped_matmul, grouped_swiglu  # noqa: F401
