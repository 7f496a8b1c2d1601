"""Grouped-query attention (arXiv:2305.13245): keys and values per KV head, with or without a cache of them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mlaflax.cache import LatentCache
from mlaflax.config import GQAConfig, ModelConfig
from mlaflax.formats import get_format
from mlaflax.model.layers import RMSNorm, normal
from mlaflax.model.rope import apply_rope, softmax_scale
from mlaflax.model.tokens import Tokens
from mlaflax.ops.attention import attention
from mlaflax.ops.gqa_decode import gqa_decode
from mlaflax.sharding import param


class GQA(nnx.Module):
    """Grouped-query attention, multi-head attention where there are as many KV heads as heads.

    The cache entry of a token is, for each KV head, its value and its rotated key.

    Parameters, float32: `q [d, h, n]`, `k [d, g, n]`, `v [d, g, n]`, `out [h, n, d]`; with `qkv_bias` also `q_bias
    [h, n]`, `k_bias [g, n]`, `v_bias [g, n]`; with `qk_norm` also `q_norm [n]` and `k_norm [n]`.
    """

    codebook: Any = None  # there is no format of keys and values that needs one

    def __init__(self, config: ModelConfig, a: GQAConfig, *, rngs: nnx.Rngs):
        d, std = config.hidden_size, config.init_std
        h, g, n = a.num_heads, a.num_kv_heads, a.head_dim
        for name, heads, axis in (("q", h, "heads"), ("k", g, "kv_heads"), ("v", g, "kv_heads")):
            setattr(self, name, param(normal(rngs, (d, heads, n), std), "embed", axis, "head_dim"))
            if a.qkv_bias:
                setattr(self, f"{name}_bias", param(jnp.zeros((heads, n)), axis, "head_dim"))
        self.out = param(normal(rngs, (h, n, d), std), "heads", "head_dim", "embed")
        if a.qk_norm:
            self.q_norm = RMSNorm(n, config.norm_eps, axis="head_dim")
            self.k_norm = RMSNorm(n, config.norm_eps, axis="head_dim")
        self.config = a
        self.cache_format = config.cache_format
        self.dtype = jnp.dtype(config.dtype)
        self.scale = softmax_scale(a)

    def __call__(
        self,
        x: Float[Array, "b q d"],
        tokens: Tokens,
        cache: LatentCache | None = None,
        layer: Int[Array, ""] | int = 0,
    ) -> tuple[Float[Array, "b q d"], LatentCache | None]:
        """Attend within the segments of `x`, or, with a cache, append to layer `layer` of it and attend to it."""
        x = x.astype(self.dtype)
        q, k, v = (self._project(x, name) for name in "qkv")
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (apply_rope(y, tokens.cos, tokens.sin, self.config.rope.convention) for y in (q, k))
        if cache is None:
            with jax.named_scope("naive_attention"):
                heads = self._naive(q, k, v, tokens)
        else:
            with jax.named_scope("cached_attention"):
                heads, cache = self._cached(q, k, v, tokens, cache, layer)
        return jnp.einsum("bqhn,hnd->bqd", heads.astype(self.dtype), self._cast(self.out)), cache

    def _cast(self, weight: nnx.Param) -> Array:
        return weight[...].astype(self.dtype)

    def _project(self, x: Float[Array, "b q d"], name: str) -> Float[Array, "b q heads n"]:
        y = jnp.einsum("bqd,dhn->bqhn", x, self._cast(getattr(self, name)))
        return y + self._cast(getattr(self, f"{name}_bias")) if self.config.qkv_bias else y

    def _naive(self, q, k, v, tokens: Tokens) -> Float[Array, "b q h n"]:
        v, k = get_format(self.cache_format).simulate(v, k)
        repeats = self.config.num_heads // self.config.num_kv_heads
        k, v = (jnp.repeat(y.astype(self.dtype), repeats, axis=2) for y in (k, v))
        return attention(q.astype(self.dtype), k, v, tokens.segment_ids, scale=self.scale)

    def _cached(
        self, q, k, v, tokens: Tokens, cache: LatentCache, layer
    ) -> tuple[Float[Array, "b q h n"], LatentCache]:
        g = self.config.num_kv_heads
        b, length = tokens.positions.shape

        def per_head(y: Float[Array, "b q g n"]) -> Float[Array, "b*g q n"]:
            return jnp.swapaxes(y.astype(jnp.float32), 1, 2).reshape(b * g, length, -1)

        heads = cache.per_head(layer, g)
        positions, valid = (jnp.repeat(y, g, axis=0) for y in (tokens.positions, tokens.valid))
        heads = heads.append(0, per_head(v), per_head(k), positions, valid)
        q_pos = jnp.where(tokens.valid, tokens.positions, -1)
        table = heads.block_table.reshape(b, g, -1)
        out, _ = gqa_decode(
            q, q_pos, heads.pool, table, cache.page_pos(), format=cache.format, scale=self.scale
        )
        return out, heads.of_all(cache)
