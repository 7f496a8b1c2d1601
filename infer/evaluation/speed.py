"""Decoding in tokens per second: one sequence whose cache is full to the context, formats taking turns."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infer.evaluation.variants import Variant
from mlaflax.decode import Engine, EngineConfig
from mlaflax.decode.steps import EngineState
from mlaflax.model import Transformer

# Rounds in each of which every format decodes this many tokens.
ROUNDS, TOKENS = 5, 16


class Decoder:
    """An engine with one sequence, its cache taken to be full up to a context: nothing is prefilled."""

    def __init__(self, model: Transformer, variant: Variant, context: int):
        config = EngineConfig(
            variant.cache_format, max_sequences=1, max_length=context, rope_format=variant.rope_format
        )
        self._engine = Engine(variant.simulated(model), config=config)
        self._context, state = context, self._engine.state
        pages = jnp.arange(state.cache.block_table.size, dtype=jnp.int32)[None]
        self._state = dataclasses.replace(
            state,
            cache=dataclasses.replace(state.cache, block_table=pages),
            limit=jnp.full((1,), 1 << 30, jnp.int32),
            active=jnp.ones((1,), bool),
        )

    def seconds(self, tokens: int) -> float:
        """Decode the last `tokens` tokens of the context."""
        start = jnp.full((1,), self._context - tokens, jnp.int32)
        state: EngineState = dataclasses.replace(self._state, position=start)
        state = jax.block_until_ready(jax.device_put(state, state.token.sharding))
        began = time.perf_counter()
        for _ in range(tokens):
            state, sampled = self._engine.decode_step(state)
            jax.block_until_ready(sampled)
        self._state = state
        return time.perf_counter() - began


def measure(
    model: Transformer,
    variants: Sequence[Variant],
    context: int,
    advance: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Medians of tokens per second, and of the ratios to the formats `f32` and `bf16` of the same round.

    Args:
      variants: those that a cache can hold.
      context: tokens in the cache when decoding ends.
      advance: told of every round of a variant that is done.
    """
    # Once for all, so that the engines share the weights.
    shared = model.unstacked() if jax.default_backend() == "cpu" else model
    decoders = {v.name: Decoder(shared, v, context) for v in variants}
    rates: dict[str, list[float]] = {name: [] for name in decoders}
    for round in range(ROUNDS + 1):
        for name, decoder in decoders.items():
            seconds = decoder.seconds(TOKENS)
            if round:  # the first one compiles
                rates[name].append(TOKENS / seconds)
            advance(name)
    return {
        "context": context,
        "rounds": ROUNDS,
        "tokens_per_round": TOKENS,
        "variants": {
            name: {
                "tokens_per_second": float(np.median(found)),
                **{
                    f"of_{other}": float(np.median(np.divide(found, rates[other])))
                    for other in ("f32", "bf16")
                    if other in rates
                },
            }
            for name, found in rates.items()
        },
    }


def steps(variants: Sequence[Variant]) -> int:
    """How often `measure` tells of something done."""
    return (ROUNDS + 1) * len(variants)
