"""What rounding costs in perplexity: NLL per token, paired with the bf16 cache of the same weights.

Every variant reads the same rows, teacher-forced. The simulated graph is measured (`Transformer.simulating`), and
the real cache of that format, with the rows appended chunk by chunk.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from infer.evaluation.served import CHUNK, Served
from infer.evaluation.statistics import clustered_mean, perplexity_change
from infer.evaluation.text import Rows
from infer.evaluation.variants import BASELINE, Variant, far_from
from mlaflax.checkpoint import CheckpointError
from mlaflax.config import MixedConfig
from mlaflax.model import Transformer

# Tokens in one call of the model, and logits that exist at a time.
BATCH_TOKENS = 4096
HEAD_LOGITS = 1 << 24


class Scores(NamedTuple):
    """Per target: -log p(target), KL(baseline || this) in nats, and whether both have the same first choice."""

    nll: Float[Array, "b q"]
    kl: Float[Array, "b q"]
    agrees: Float[Array, "b q"]


@functools.partial(jax.jit, static_argnames="graph")
def hidden_states(
    graph: nnx.GraphDef, weights: nnx.State, tokens: Int[Array, "b q"]
) -> Float[Array, "b q d"]:
    """What the head takes, from the training graph."""
    return nnx.merge(graph, weights)(tokens).hidden


@functools.partial(jax.jit, static_argnames=("graph", "logits_at_once"))
def score(
    graph: nnx.GraphDef,
    weights: nnx.State,
    baseline: Float[Array, "b q d"],
    hidden: Float[Array, "b q d"],
    tokens: Int[Array, "b q"],
    logits_at_once: int = HEAD_LOGITS,
) -> Scores:
    """Compare two hidden states of the same rows; each position predicts the row's next token, `[b, q - 1]`."""
    model = nnx.merge(graph, weights)
    b, q = tokens.shape
    total = b * (q - 1)
    piece = min(total, max(1, logits_at_once // model.config.vocab_size))
    padding = -total % piece

    def cut(x: Array) -> Array:
        x = x.reshape(total, *x.shape[2:])
        x = jnp.pad(x, ((0, padding), *[(0, 0)] * (x.ndim - 1)))
        return x.reshape(-1, piece, *x.shape[1:])

    def one(parts):
        base, this, target = parts
        log_p, log_q = (jax.nn.log_softmax(model.logits(x), axis=-1) for x in (base, this))
        nll = -jnp.take_along_axis(log_q, target[:, None], axis=-1)[:, 0]
        kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
        return nll, kl, (jnp.argmax(log_p, -1) == jnp.argmax(log_q, -1)).astype(jnp.float32)

    scores = jax.lax.map(one, (cut(baseline[:, :-1]), cut(hidden[:, :-1]), cut(tokens[:, 1:])))
    return Scores(*(x.reshape(-1)[:total].reshape(b, q - 1) for x in scores))


def _batch(rows: Rows) -> int:
    return max(1, min(len(rows.tokens), BATCH_TOKENS // rows.tokens.shape[1]))


def steps(rows: Rows, variants: Sequence[Variant]) -> int:
    """How often `measure` tells of something done."""
    return -(-len(rows.tokens) // _batch(rows)) * len(variants)


class Collected(NamedTuple):
    """Scores of every target, float64 `[rows, context - 1]`, by variant; those of the real cache where it was read."""

    simulated: dict[str, Scores]
    cached: dict[str, Scores]


def measure(
    model: Transformer,
    variants: Sequence[Variant],
    rows: Rows,
    *,
    chunk: int = CHUNK,
    real_cache: bool = True,
    advance: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Perplexity of every variant on the rows, and what it is beside the baseline's; arguments as `collect`."""
    found = collect(model, variants, rows, chunk=chunk, real_cache=real_cache, advance=advance)
    return summary(variants, rows, found)


def collect(
    model: Transformer,
    variants: Sequence[Variant],
    rows: Rows,
    *,
    chunk: int = CHUNK,
    real_cache: bool = True,
    advance: Callable[[str], None] = lambda _: None,
) -> Collected:
    """Score every variant on the rows beside the baseline.

    Args:
      variants: the first one is the baseline.
      chunk: tokens appended to the real cache at a time.
      real_cache: measure that, too.
      advance: told of every batch of a variant that is done.

    Raises:
      CheckpointError: the model's own logits are not numbers.
    """
    size = _batch(rows)
    head = nnx.split(model)
    graphs = {v.name: nnx.split(v.simulated(model)) for v in variants}
    served = {v.name: Served(model, v, chunk) for v in variants if real_cache and v.served}
    simulated: dict[str, list[Scores]] = {v.name: [] for v in variants}
    cached: dict[str, list[Scores]] = {name: [] for name in served}
    for start in range(0, len(rows.tokens), size):
        tokens = rows.tokens[start : start + size]
        count = len(tokens)
        tokens = np.pad(tokens, ((0, size - count), (0, 0)), mode="edge")  # one shape, compiled once
        base = base_cached = None
        for variant in variants:
            hidden = hidden_states(*graphs[variant.name], tokens)
            base = hidden if base is None else base
            simulated[variant.name].append(_take(score(*head, base, hidden, tokens), count))
            if variant.name in served:
                states, _ = served[variant.name].prefill(tokens)
                base_cached = states if base_cached is None else base_cached
                cached[variant.name].append(_take(score(*head, base_cached, states, tokens), count))
            advance(variant.name)
    found = Collected(*({name: _joined(parts) for name, parts in x.items()} for x in (simulated, cached)))
    _require_numbers(found.simulated[variants[0].name].nll)
    return found


def summary(variants: Sequence[Variant], rows: Rows, found: Collected) -> dict[str, Any]:
    """Means and changes from per-token scores; the first variant is the baseline."""
    simulated, cached = found
    context = rows.tokens.shape[1]
    far = far_from(variants, context)
    scopes = {"all": slice(0, None)} | ({} if far is None else {"far": slice(far, None)})
    baseline = variants[0].name
    result: dict[str, Any] = {
        "baseline": baseline,
        "rows": len(rows.tokens),
        "context": context,
        "documents": len(np.unique(rows.documents)),
        "far_from": far,
        "variants": {},
    }
    for variant in variants:
        scores, real = simulated[variant.name], cached.get(variant.name)
        values: dict[str, Any] = {
            scope: {
                **_compared(scores, simulated[baseline], rows.documents, where),
                "real_cache": None
                if real is None
                else _compared(real, cached[baseline], rows.documents, where),
            }
            for scope, where in scopes.items()
        }
        if real is not None:
            apart = real.nll - scores.nll
            values["real_minus_simulated"] = {
                "mean_nll_difference": float(apart.mean()),
                "largest": float(np.abs(apart).max()),
            }
        if variant.tiered:
            for scope, where in scopes.items():
                values[scope]["cold_share"] = cold_share(variant.mixed, context, where.start)
        result["variants"][variant.name] = values
    return result


def _compared(scores: Scores, base: Scores, documents: np.ndarray, where: slice) -> dict[str, Any]:
    nll, kl, agrees, base_nll = (np.asarray(x)[:, where] for x in (*scores, base.nll))
    difference = clustered_mean(nll - base_nll, documents)
    change = perplexity_change(difference)
    mean_kl = clustered_mean(kl, documents)
    return {
        "tokens": difference.tokens,
        "documents": difference.documents,
        "perplexity": math.exp(min(float(nll.mean()), 700.0)) if np.isfinite(nll).all() else math.nan,
        "nll": float(nll.mean()),
        "nll_difference": difference.mean,
        "nll_difference_error": difference.error,
        "perplexity_change_percent": change.percent,
        "perplexity_change_error": change.error,
        "kl": mean_kl.mean,
        "kl_error": mean_kl.error,
        "top1_agreement": float(agrees.mean()),
    }


def cold_share(config: MixedConfig, context: int, start: int = 0) -> dict[str, float]:
    """Share of the tokens up to itself that a query reads cold, over the queries from `start` on.

    Every query past the window keeps as many tokens as there are places for, so it follows from positions alone.
    """
    position = np.arange(start, context)
    before_window = np.maximum(0, (position // config.page - config.ring + 1) * config.page)
    share = np.maximum(0, before_window - config.kept) / (position + 1)
    return {"mean": float(share.mean()), "last": float(share[-1])}


def _take(scores: Scores, count: int) -> Scores:
    return Scores(*(np.asarray(x, np.float64)[:count] for x in scores))  # pyright: ignore[reportArgumentType]


def _joined(parts: list[Scores]) -> Scores:
    return Scores(*(np.concatenate(x) for x in zip(*parts, strict=True)))  # pyright: ignore[reportArgumentType]


def _require_numbers(nll: Any) -> None:
    if not np.isfinite(nll).all():
        raise CheckpointError(
            f"the model's logits are not numbers for {np.mean(~np.isfinite(nll)):.0%} of the tokens, "
            f"with the {BASELINE} cache as it is: its weights are damaged or training diverged"
        )
