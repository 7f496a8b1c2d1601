"""Text through the real cache, chunk by chunk, as the engine prefills it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from infer.evaluation.variants import Variant
from mlaflax.cache import LatentCache
from mlaflax.model import Transformer

# Tokens appended at a time: enough that latents are expanded (`mla_prefill`), few enough for any memory.
CHUNK = 256


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="cache")
def _append(graph, weights, cache, tokens, start, count):
    return _call(graph, weights, cache, tokens, start, count)


@functools.partial(jax.jit, static_argnames="graph")
def _look(graph, weights, cache, tokens, start, count):
    return _call(graph, weights, cache, tokens, start, count)[0]


def _call(graph, weights, cache: LatentCache, tokens, start, count) -> tuple[Array, LatentCache | None]:
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(start + offset, tokens.shape)
    valid = jnp.broadcast_to((offset < count).astype(jnp.int32), tokens.shape)
    output = nnx.merge(graph, weights)(tokens, positions, valid, cache=cache)
    return output.hidden, output.cache


class Served:
    """A model that reads text through a cache of one variant; compiled once per batch size."""

    def __init__(self, model: Transformer, variant: Variant, chunk: int = CHUNK):
        # As the engine does: a scan copies each layer's weights before it uses them.
        serving = model.unstacked() if jax.default_backend() == "cpu" else model
        self._model, self._variant, self._chunk = serving, variant, chunk
        self._graph, self._weights = nnx.split(serving)

    def prefill(
        self, tokens: np.ndarray, length: int | None = None, *, keep: bool = True
    ) -> tuple[Float[np.ndarray, "b q d"], LatentCache]:
        """Append `tokens` int32 `[b, q]` to an empty cache that has room for `length` tokens.

        Returns:
          What the head takes, of every position (`keep`) or of the last chunk's, on the host; and the cache.
        """
        b, q = tokens.shape
        cache = self._variant.cache(self._model, length or q, num_sequences=b)
        hidden = []
        for start in range(0, q, self._chunk):
            here = tokens[:, start : start + self._chunk]
            count = here.shape[1]
            here = np.pad(here, ((0, 0), (0, self._chunk - count)))
            out, cache = _append(self._graph, self._weights, cache, here, np.int32(start), np.int32(count))
            if keep or start + count == q:
                hidden.append(np.asarray(out[:, :count]))
        return np.concatenate(hidden, axis=1), cache

    def look(self, cache: LatentCache, tokens: np.ndarray, start: int) -> Any:
        """Hidden states `[b, q, d]` of `tokens` after the `start` tokens in `cache`, which stays as it is."""
        return _look(self._graph, self._weights, cache, tokens, np.int32(start), np.int32(tokens.shape[1]))
