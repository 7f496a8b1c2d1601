"""Which tokens outside the window stay in 8 bits: the rule that training, prefill and decode share.

A token's salience is its normalised attention mass (ZipCache, arXiv:2405.14256): the attention it got from the
probing queries, those at multiples of `MixedConfig.probe_stride`, summed over heads and divided by their number.
It is measured while the token is read in 8 bits. When a page leaves the window, its tokens and those kept so far
compete: the most salient stay, and the rest are read in 4 bits from then on. Sinks do not compete: they stay for
their position. So the choice depends on the past alone, at places that positions alone determine, however the text
was cut into calls.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mlaflax.config import MixedConfig


def salience(
    index: Int[Array, "b k"], mass: Float[Array, "b k"], page: Int[Array, " b"], config: MixedConfig
) -> Float[Array, "b k"]:
    """What each token is worth when page `page` begins.

    Args:
      index: the token's index in its sequence, -1 for none.
      mass: attention that it got from the probing queries from itself on to the end of the page before.
      page: number of the page that begins, in the sequence.

    Returns:
      Mass per probing query; -infinity for sinks and for no token.
    """
    stride = config.probe_stride
    # Probes at multiples of `stride`, from `index` on and before the page: the page begins at one of them.
    probes = page[:, None] * (config.page // stride) - (index + stride - 1) // stride
    worth = mass / jnp.maximum(probes, 1)
    if config.choose == "random":
        # A number of the token's own (Fibonacci hashing, Knuth 6.4), so that a choice once made can last.
        worth = (index.astype(jnp.uint32) * jnp.uint32(2654435769) >> 8).astype(jnp.float32)
    return jnp.where(index >= config.sinks, worth, -jnp.inf)


def sink_index(page: Int[Array, " b"], config: MixedConfig) -> Int[Array, "b s"]:
    """Index in its sequence of each sink that queries on page `page` keep, -1 while it is in the window or ahead."""
    index = jnp.arange(config.sinks, dtype=jnp.int32)
    return jnp.where(index // config.page <= page[:, None] - config.ring, index, -1)


def strongest(worth: Float[Array, "b k"], count: int) -> tuple[Int[Array, "b e"], Float[Array, "b e"]]:
    """Places of the `count` best and their worth, best first; the first place wins a tie."""
    best, place = jax.lax.top_k(worth, count)
    return place, best
