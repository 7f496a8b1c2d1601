"""Latent attention of many queries over a paged pool: keys and values expanded block by block."""

from mlaflax.ops.mla_prefill.api import is_cheaper, mla_prefill

__all__ = ["is_cheaper", "mla_prefill"]
