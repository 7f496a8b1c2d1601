"""The decoder and its parts."""

from mlaflax.model.transformer import Output, Transformer, init_model

__all__ = ["Output", "Transformer", "init_model"]
