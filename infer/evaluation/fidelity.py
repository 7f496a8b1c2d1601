"""What rounding does inside the model: errors of latents and of attention, and where attention goes, per layer.

Every layer is given the activations of the exact model, so that its error is its own. Errors are normalised: the
sum of squared differences by the sum of squares of what is exact. Attention is that of queries with at least eight
windows before them, where a mixed cache is among the variants.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from infer.evaluation.text import Rows
from infer.evaluation.variants import Variant, far_from
from mlaflax.config import ConfigError
from mlaflax.formats import FORMATS, get_format
from mlaflax.model import Transformer
from mlaflax.model.mla import MLA
from mlaflax.model.rope import rope_tables
from mlaflax.model.tokens import Tokens
from mlaflax.ops.attention import tiered_attention

# Rows whose sums tell no more than these.
ROWS = 8
TIERS = ("window", "kept", "cold")
SHARES = ("window", "sinks", "salient", "cold")


def _squares(x: Array) -> Float[Array, ""]:
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def _run(graph: nnx.GraphDef, state: nnx.State, x: Array, tokens: Tokens) -> Float[Array, "b q d"]:
    return nnx.merge(graph, state)(x, tokens, None, 0)[0]


# One function for layers and for attention modules: both take the residual stream or its norm and the tokens.
_layer = jax.jit(_run, static_argnames="graph")


@functools.partial(jax.jit, static_argnames=("graph", "names"))
def latent_errors(
    graph: nnx.GraphDef, state: nnx.State, x: Float[Array, "b q d"], tokens: Tokens, names: tuple[str, ...]
) -> Float[Array, "formats 2 2"]:
    """Squared error and square, of latent and rope key, in each of the formats."""
    attn = nnx.merge(graph, state)
    latent, rope = attn.entry(x.astype(attn.dtype), tokens)
    found = []
    for name in names:
        fmt = get_format(name)
        codebook = attn.codebook[...] if attn.codebook is not None and fmt.codebook else None
        read = fmt.simulate(latent, rope, codebook)
        found.append([
            jnp.stack([_squares(now - was), _squares(was)]) for now, was in zip(read, (latent, rope), strict=True)
        ])  # fmt: skip
    return jnp.array(found)


@functools.partial(jax.jit, static_argnames=("graph", "first"))
def tiers(
    graph: nnx.GraphDef, state: nnx.State, x: Float[Array, "b q d"], tokens: Tokens, first: int
) -> tuple[Float[Array, "3 2"], Float[Array, "4"]]:
    """Attention with one tier at a time rounded, and the attention that each tier gets.

    Tiers are those of the mixed cache that `graph` simulates, with the choices it makes here.

    Args:
      first: the first page of queries that counts; the last one only if it is whole.

    Returns:
      Squared error and square of the output with window, kept and cold tokens rounded; the mean attention, over
      heads and queries, on window, sinks, salient and cold tokens.
    """
    attn: MLA = nnx.merge(graph, state)
    config, x = attn.mixed, x.astype(attn.dtype)
    q = jnp.concatenate([part.astype(attn.dtype) for part in attn.queries(x, tokens)], axis=-1)
    entry = attn.entry(x, tokens)
    exact, hot = attn.expanded(get_format("f32"), *entry), attn.expanded(get_format(config.hot), *entry)
    cold = None
    if config.cold != "none":
        cold = attn.expanded(get_format(config.cold, attn.rope_format), *entry)
    _, kept = tiered_attention(q, hot, cold, tokens.segment_ids, scale=attn.scale, config=config)
    b, length = x.shape[:2]
    index = jnp.arange(length)

    def page(p: Int[Array, ""]) -> tuple[Array, Array]:
        row = p * config.page + jnp.arange(config.page)
        qi = jax.lax.dynamic_slice_in_dim(q, p * config.page, config.page, 1) * attn.scale
        visible = index <= row[:, None]
        near = jnp.broadcast_to(index >= (p - config.ring + 1) * config.page, (b, length))
        held = jnp.zeros((b, length), bool)
        if config.kept:
            place = jnp.where(kept[p] >= 0, kept[p], length)
            held = held.at[jnp.arange(b)[:, None], place].set(True, mode="drop") & ~near
        far = ~near & ~held

        def scores(k: Array) -> Array:
            return jnp.einsum("bqhn,bkhn->bhqk", qi, k, preferred_element_type=jnp.float32)

        def output(mask: Array, scored: Array, values: Array) -> Array:
            """Attention that reads the masked tokens so, and all others exactly."""
            mask = mask[:, None, None]
            weights = jax.nn.softmax(jnp.where(visible, jnp.where(mask, scored, plain), -jnp.inf), axis=-1)
            heads = jnp.einsum("bhqk,bkhv->bqhv", jnp.where(mask, weights, 0), values)
            heads += jnp.einsum("bhqk,bkhv->bqhv", jnp.where(mask, 0, weights), exact[1])
            return jnp.einsum("bqhv,hvd->bqd", heads, attn.out[...])

        plain = scores(exact[0])
        true = output(jnp.zeros_like(near), plain, exact[1])
        warm = scores(hot[0])
        errors = [_squares(output(mask, warm, hot[1]) - true) for mask in (near, held)]
        errors.append(
            jnp.zeros(()) if cold is None else _squares(output(far, scores(cold[0]), cold[1]) - true)
        )
        weights = jax.nn.softmax(jnp.where(visible, plain, -jnp.inf), axis=-1).mean(axis=(1, 2))
        sinks = held & (index < config.sinks)
        mass = [jnp.sum(jnp.where(mask, weights, 0)) / b for mask in (near, sinks, held & ~sinks, far)]
        return jnp.stack([jnp.stack(errors), jnp.full(3, _squares(true))], axis=1), jnp.stack(mass)

    errors, mass = jax.lax.map(page, jnp.arange(first, length // config.page))
    return errors.sum(0), mass.mean(0)


def measure(
    model: Transformer,
    variants: Sequence[Variant],
    rows: Rows,
    advance: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Errors of every layer; see the module.

    Args:
      rows: of which the first `ROWS` are read, one at a time.
      advance: told of every layer of a row that is done.
    """
    context = rows.tokens.shape[1]
    far = far_from(variants, context) or 0
    formats = tuple(name for name, fmt in FORMATS.items() if not fmt.exact and _fits(name, model))
    exact = _layers(model.simulating(cache_format="f32", rope_format="bf16").unstacked())
    simulated = {v.name: _layers(v.simulated(model).unstacked()) for v in variants}
    latent = np.zeros((len(exact), len(formats), 2, 2))
    outputs = {v.name: np.zeros((len(exact), 2)) for v in variants}
    tier = {v.name: np.zeros((len(exact), len(TIERS), 2)) for v in variants if v.tiered}
    mass = {v.name: np.zeros((len(exact), len(SHARES))) for v in variants if v.tiered}
    chosen = rows.tokens[:ROWS]
    for row in chosen:
        tokens = _tokens(model, context)
        x = jnp.take(model.embed[...], row[None], axis=0).astype(jnp.dtype(model.config.dtype))
        for i, layer in enumerate(exact):
            h = layer.attn_norm(x)
            latent[i] += np.asarray(latent_errors(*nnx.split(layer.attn), h, tokens, formats))
            true = _layer(*nnx.split(layer.attn), h, tokens)[:, far:]
            for v in variants:
                parts = nnx.split(simulated[v.name][i].attn)
                got = _layer(*parts, h, tokens)[:, far:]
                outputs[v.name][i] += np.asarray([_squares(got - true), _squares(true)])
                if v.tiered:
                    errors, shares = tiers(*parts, h, tokens, -(-far // v.mixed.page))
                    tier[v.name][i] += np.asarray(errors)
                    mass[v.name][i] += np.asarray(shares) / len(chosen)
            x = _layer(*nnx.split(layer), x, tokens)
            advance(f"layer {i + 1}")
    return {
        "rows": len(chosen),
        "context": context,
        "queries_from": far,
        "layers": [
            {
                "latent": {
                    name: {"latent": _ratio(latent[i, f, 0]), "rope": _ratio(latent[i, f, 1])}
                    for f, name in enumerate(formats)
                },
                "attention": {name: _ratio(sums[i]) for name, sums in outputs.items()},
                "tiers": {
                    name: {t: _ratio(sums[i, j]) for j, t in enumerate(TIERS)} for name, sums in tier.items()
                },
                "mass": {
                    name: dict(zip(SHARES, means[i].tolist(), strict=True)) for name, means in mass.items()
                },
            }
            for i in range(len(exact))
        ],
    }


def steps(model: Transformer, rows: Rows) -> int:
    """How often `measure` tells of something done."""
    return min(ROWS, len(rows.tokens)) * model.config.num_layers


def _layers(model: Any) -> list[Any]:
    """The layers of an unstacked model, from the bottom up."""
    return [*(model.dense_layers or []), *(model.moe_layers or [])]


def _tokens(model: Transformer, length: int) -> Tokens:
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    attention = model.config.attention
    tables = rope_tables(attention.rope, attention.rope_dim, positions)
    return Tokens(positions, jnp.ones_like(positions), *tables)


def _fits(name: str, model: Transformer) -> bool:
    try:
        get_format(name).parts(*model.config.attention.cache_dims)
    except ConfigError:
        return False
    return True


def _ratio(sums: np.ndarray) -> float:
    """Squared error by square; 0 of nothing is 0."""
    return float(sums[0] / sums[1]) if sums[1] else 0.0
