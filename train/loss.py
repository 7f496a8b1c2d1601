"""Cross-entropy over a large vocabulary, without the logits of a whole batch in memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def token_losses(
    logits_of: Callable[[Float[Array, "b q d"]], Float[Array, "b q w"]],
    hidden: Float[Array, "b q d"],
    targets: Int[Array, "b q"],
    vocab_size: int,
    chunk: int,
) -> Float[Array, "b q"]:
    """-log p(target) of each position, float32.

    At most `chunk` logits exist at a time (or those of one position per row): longer sequences are cut along
    positions, so that the batch keeps its sharding, and the backward pass computes each piece's logits again.
    """
    rows, length = targets.shape
    pieces = min(length, -(-rows * length * vocab_size // chunk))
    if pieces == 1:
        return _losses(logits_of(hidden), targets)
    piece = -(-length // pieces)
    padding = piece * pieces - length

    @jax.checkpoint
    def one(pair):
        return _losses(logits_of(pair[0]), pair[1])

    def cut(x):
        x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(rows, pieces, piece, *x.shape[2:]), 1, 0)

    losses = jax.lax.map(one, (cut(hidden), cut(targets)))
    return jnp.moveaxis(losses, 0, 1).reshape(rows, -1)[:, :length]


def _losses(logits: Float[Array, "b q w"], targets: Int[Array, "b q"]) -> Float[Array, "b q"]:
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
