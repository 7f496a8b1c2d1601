"""Mixture of experts: router, dropless dispatch by sorting, shared experts, loss-free balancing."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mlaflax.config import MoEConfig
from mlaflax.model.layers import SwiGLU, normal
from mlaflax.ops.grouped_matmul import grouped_swiglu
from mlaflax.sharding import param


class ExpertBias(nnx.Variable):
    """The selection bias of each expert: state that `update_bias` moves, not a parameter an optimiser sees."""


class MoEStats(NamedTuple):
    """What training needs from a layer.

    Attributes:
      expert_load: tokens routed to each expert, padding not counted.
      sequence_loss: the sequence-wise balance loss, times its coefficient.
      z_loss: the router's z-loss, times its coefficient.
    """

    expert_load: Float[Array, "*layers e"]
    sequence_loss: Float[Array, "*layers"]
    z_loss: Float[Array, "*layers"]


def route(
    logits: Float[Array, "n e"], bias: Float[Array, "e"], config: MoEConfig
) -> tuple[Float[Array, "n k"], Int[Array, "n k"], Float[Array, "n e"]]:
    """Choose `top_k` experts for each token.

    Experts are selected by score + bias and weighted by the score alone, so that the bias has no gradient
    and moves only the selection (arXiv:2408.15664). With groups, the experts of all but the `top_groups`
    best groups are out of the running (DeepSeek-V2, arXiv:2405.04434; V3, arXiv:2412.19437).

    Args:
      logits: float32 router outputs.
      bias: float32 selection bias.

    Returns:
      weights: float32 weights of the selected experts, normalised and scaled as `config` says.
      indices: int32 selected experts, best first.
      scores: float32 scores of all experts.
    """
    match config.score:
        case "softmax":
            scores = jax.nn.softmax(logits, axis=-1)
        case "sigmoid":
            scores = jax.nn.sigmoid(logits)
        case "sqrt_softplus":
            scores = jnp.sqrt(jax.nn.softplus(logits))
    biased = jax.lax.stop_gradient(scores + bias)
    if config.num_groups > 1:
        n, e = biased.shape
        groups = biased.reshape(n, config.num_groups, e // config.num_groups)
        match config.group_score:
            case "max":
                worth = groups.max(-1)
            case "top2":
                worth = jax.lax.top_k(groups, 2)[0].sum(-1)
        best = jax.lax.top_k(worth, config.top_groups)[1]
        kept = (best[:, :, None] == jnp.arange(config.num_groups)).any(1)
        # Not 0: a biased score can be negative, and 0 would then beat the experts of the winning groups.
        biased = jnp.where(kept[:, :, None], groups, -jnp.inf).reshape(n, e)
    indices = jax.lax.top_k(biased, config.top_k)[1]
    weights = jnp.take_along_axis(scores, indices, axis=-1)
    if config.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * config.routed_scale, indices, scores


def update_bias(
    bias: Float[Array, "*layers e"], load: Float[Array, "*layers e"], step: float
) -> Float[Array, "*layers e"]:
    """Loss-free balancing (arXiv:2408.15664): raise the bias of under-loaded experts by `step`, lower the others'.

    `load` counts the tokens of the whole global batch; an expert exactly at the mean keeps its bias.
    """
    return bias + step * jnp.sign(load.mean(-1, keepdims=True) - load)


class MoE(nnx.Module):
    """A SwiGLU mixture of experts; no token is ever dropped.

    Parameters are float32: `router [d, e]`, `gate` and `up` `[e, d, f]`, `down [e, f, d]`, and `shared`, a
    `SwiGLU` of width `num_shared_experts * expert_size` (None without shared experts). `bias [e]` is an
    `ExpertBias`. Experts compute in `dtype`, the router in float32 whatever `dtype` is.
    """

    def __init__(
        self, hidden_size: int, config: MoEConfig, *, dtype: jnp.dtype, init_std: float, rngs: nnx.Rngs
    ):
        d, e, f = hidden_size, config.num_experts, config.expert_size
        self.router = param(normal(rngs, (d, e), init_std), "embed", "router")
        self.bias = param(jnp.zeros((e,), jnp.float32), "router", kind=ExpertBias)
        self.gate = param(normal(rngs, (e, d, f), init_std), "expert", "embed", "expert_mlp")
        self.up = param(normal(rngs, (e, d, f), init_std), "expert", "embed", "expert_mlp")
        self.down = param(normal(rngs, (e, f, d), init_std), "expert", "expert_mlp", "embed")
        self.shared = (
            SwiGLU(d, config.num_shared_experts * f, dtype=dtype, init_std=init_std, rngs=rngs)
            if config.num_shared_experts
            else None
        )
        self.config = config
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self, x: Float[Array, "b q d"], valid: Bool[Array, "b q"]
    ) -> tuple[Float[Array, "b q d"], MoEStats]:
        """Args:
          x: activations.
          valid: False for padding, which is routed nowhere and counted nowhere.

        Returns:
          The layer's output in `dtype` (a padding token gets the shared experts' output only), and statistics.
        """
        b, q, d = x.shape
        tokens = x.reshape(b * q, d)
        with jax.named_scope("router"):
            # HIGHEST: a TPU would otherwise round the operands of a float32 product to bfloat16.
            logits = jnp.matmul(
                tokens.astype(jnp.float32), self.router[...], precision=jax.lax.Precision.HIGHEST
            )
            weights, indices, scores = route(logits, self.bias[...], self.config)
        with jax.named_scope("experts"):
            y, load = self._experts(tokens.astype(self.dtype), weights, indices, valid.reshape(-1))
            y = y.reshape(b, q, d)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, self._stats(logits, scores, indices, valid, load)

    def _experts(self, tokens, weights, indices, valid):
        """Sort the (token, choice) pairs by expert, padding last; multiply; put them back in order."""
        n, k = indices.shape
        e = self.config.num_experts
        expert = jnp.where(valid[:, None], indices, e).reshape(-1)
        order = jnp.argsort(expert, stable=True)
        load = jnp.zeros((e,), jnp.int32).at[expert].add(1, mode="drop")
        # The op rounds the weights to the dtype of the rows: on CPU only those of experts that have rows.
        rows = grouped_swiglu(tokens[order // k], self.gate[...], self.up[...], self.down[...], load)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(n * k))
        choices = rows[place].reshape(n, k, -1)
        y = jnp.einsum("nkd,nk->nd", choices.astype(jnp.float32), weights)
        return y.astype(self.dtype), load.astype(jnp.float32)

    def _stats(self, logits, scores, indices, valid, load) -> MoEStats:
        c = self.config
        b, q = valid.shape
        zero = jnp.zeros((), jnp.float32)
        sequence_loss = z_loss = zero
        if c.sequence_loss:
            # alpha * sum_e f_e P_e per sequence (DeepSeek-V3, equations 17-20), averaged over the sequences.
            length = valid.sum(-1)
            chosen = jax.nn.one_hot(indices, c.num_experts).sum(1).reshape(b, q, -1)
            share = (scores / (scores.sum(-1, keepdims=True) + 1e-20)).reshape(b, q, -1)
            per_token = 1 / jnp.maximum(length, 1)[:, None]
            f = c.num_experts / c.top_k * (chosen * valid[:, :, None]).sum(1) * per_token
            p = (share * valid[:, :, None]).sum(1) * per_token
            sequence_loss = c.sequence_loss * (f * p).sum() / jnp.maximum((length > 0).sum(), 1)
        if c.z_loss:
            # ST-MoE (arXiv:2202.08906), equation 5.
            z = jax.nn.logsumexp(logits, axis=-1) ** 2
            z_loss = c.z_loss * jnp.where(valid.reshape(-1), z, 0).sum() / jnp.maximum(valid.sum(), 1)
        return MoEStats(load, sequence_loss, z_loss)
