"""Absorbed latent attention over a paged pool of packed tokens."""

from mlaflax.ops.mla_decode.api import merge_lse, mla_decode

__all__ = ["merge_lse", "mla_decode"]
