"""The two compiled programs of the engine: prefill one chunk of one sequence, decode one token of all.

Both are pure functions of `(weights, state)` with the state donated: the pool is updated where it
stands. Their shapes depend on the engine's configuration alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int

from mlaflax.cache import LatentCache
from mlaflax.decode.sampling import Sampled, SamplingArrays, sample


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "token", "position", "generated", "limit", "active", "sampling", "stop_at_eos"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class EngineState:
    """Everything on the device, one entry per slot.

    Attributes:
      cache: pages and block tables.
      token: int32, the newest token, not in the cache yet.
      position: int32, where that token goes: the number of tokens in the cache.
      generated: int32, tokens generated so far.
      limit: int32, tokens to generate at most.
      active: whether the slot is generating. A slot ends itself at its limit and at end of text.
      sampling: how each slot is sampled.
      stop_at_eos: whether end of text ends the slot.
    """

    cache: LatentCache
    token: Int[Array, " b"]
    position: Int[Array, " b"]
    generated: Int[Array, " b"]
    limit: Int[Array, " b"]
    active: Bool[Array, " b"]
    sampling: SamplingArrays
    stop_at_eos: Bool[Array, " b"]

    @classmethod
    def create(cls, cache: LatentCache) -> "EngineState":
        b = cache.block_table.shape[0]
        counts = functools.partial(jnp.zeros, (b,), jnp.int32)
        return cls(
            cache=cache,
            token=counts(),
            position=counts(),
            generated=counts(),
            limit=counts(),
            active=jnp.zeros((b,), bool),
            sampling=jax.tree.map(jnp.asarray, SamplingArrays.stack([None] * b)),
            stop_at_eos=jnp.zeros((b,), bool),
        )


def admit(
    state: EngineState,
    slot: Int[Array, ""],
    pages: Int[Array, " p"],
    limit: Int[Array, ""],
    sampling: SamplingArrays,
    stop_at_eos: Bool[Array, ""],
) -> EngineState:
    """Give a slot to a new sequence. `pages` is its block table, -1 padded; `sampling` has one entry."""
    cache = dataclasses.replace(state.cache, block_table=state.cache.block_table.at[slot].set(pages))
    return dataclasses.replace(
        state,
        cache=cache,
        position=state.position.at[slot].set(0),
        generated=state.generated.at[slot].set(0),
        limit=state.limit.at[slot].set(limit),
        active=state.active.at[slot].set(False),
        sampling=jax.tree.map(lambda all, one: all.at[slot].set(one[0]), state.sampling, sampling),
        stop_at_eos=state.stop_at_eos.at[slot].set(stop_at_eos),
    )


def release(state: EngineState, slot: Int[Array, ""]) -> EngineState:
    """Stop a slot and forget its pages."""
    cache = dataclasses.replace(state.cache, block_table=state.cache.block_table.at[slot].set(-1))
    return dataclasses.replace(state, cache=cache, active=state.active.at[slot].set(False))


def prefill(
    graph: nnx.GraphDef,
    weights: nnx.State,
    state: EngineState,
    slot: Int[Array, ""],
    tokens: Int[Array, " q"],
    count: Int[Array, ""],
    last: Bool[Array, ""],
    eos: int,
) -> tuple[EngineState, Sampled]:
    """Append a chunk of a prompt to a slot, and with the last chunk sample the first token.

    Args:
      tokens: the chunk, of which the first `count` are real.
      last: whether the prompt ends here; only then does the slot begin to generate.
    """
    model = nnx.merge(graph, weights)
    one = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=slot, slice_size=1)
    offset = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    start = state.position[slot]
    valid = (offset < count).astype(jnp.int32)
    output = model(tokens[None], (start + offset)[None], valid[None], cache=state.cache.of_sequence(slot))
    assert output.cache is not None
    hidden = jax.lax.dynamic_slice_in_dim(output.hidden[0], count - 1, 1)
    sampling = jax.tree.map(one, state.sampling)
    sampled = sample(model.logits(hidden), sampling, jnp.zeros((1,), jnp.int32))
    token = sampled.token[0]
    ended = (state.stop_at_eos[slot] & (token == eos)) | (state.limit[slot] <= 1)
    state = dataclasses.replace(
        state,
        cache=output.cache.of_all(state.cache),
        token=state.token.at[slot].set(token),
        position=state.position.at[slot].set(start + count),
        generated=state.generated.at[slot].set(jnp.where(last, 1, 0)),
        active=state.active.at[slot].set(last & ~ended),
    )
    return state, sampled


def decode(
    graph: nnx.GraphDef, weights: nnx.State, state: EngineState, eos: int
) -> tuple[EngineState, Sampled]:
    """One token for every active slot; the others stand still."""
    model = nnx.merge(graph, weights)
    active = state.active.astype(jnp.int32)
    output = model(state.token[:, None], state.position[:, None], active[:, None], cache=state.cache)
    assert output.cache is not None
    sampled = sample(model.logits(output.hidden[:, 0]), state.sampling, state.generated)
    generated = state.generated + active
    ended = (state.stop_at_eos & (sampled.token == eos)) | (generated >= state.limit)
    state = dataclasses.replace(
        state,
        cache=output.cache,
        token=jnp.where(state.active, sampled.token, state.token),
        position=state.position + active,
        generated=generated,
        active=state.active & ~ended,
    )
    return state, sampled
