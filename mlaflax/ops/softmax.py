"""Softmax over keys that come in blocks (arXiv:1805.02867), for attention that never holds all its scores."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

# Stands for "no key seen yet": finite, so that differences of two of them are not NaN.
NOTHING = -1e30


class Running(NamedTuple):
    """What is kept of the keys so far.

    Attributes:
      peak: largest score, `NOTHING` where none was visible.
      total: sum of exp(score - peak).
      acc: sum of exp(score - peak) times the value.
    """

    peak: Float[Array, "*rows"]
    total: Float[Array, "*rows"]
    acc: Float[Array, "*rows v"]

    @classmethod
    def begin(cls, rows: tuple[int, ...], value_dim: int) -> "Running":
        return cls(jnp.full(rows, NOTHING), jnp.zeros(rows), jnp.zeros((*rows, value_dim)))

    def add(
        self,
        scores: Float[Array, "*rows k"],
        times_values: Callable[[Float[Array, "*rows k"]], Float[Array, "*rows v"]],
    ) -> "Running":
        """Another block of keys.

        Args:
          scores: -infinity for keys that a row does not see.
          times_values: multiplies weights with the block's values.
        """
        peak = jnp.maximum(self.peak, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - peak[..., None])  # 0 for the hidden: `peak` is finite
        keep = jnp.exp(self.peak - peak)
        total = self.total * keep + jnp.sum(weights, axis=-1)
        return Running(peak, total, self.acc * keep[..., None] + times_values(weights))

    def end(self) -> tuple[Float[Array, "*rows v"], Float[Array, "*rows"]]:
        """Output and log-sum-exp: 0 and -inf where nothing was visible."""
        seen = self.total > 0
        safe = jnp.where(seen, self.total, 1.0)
        return self.acc / safe[..., None], jnp.where(seen, self.peak + jnp.log(safe), -jnp.inf)
