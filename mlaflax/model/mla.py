"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): naive form without a cache, absorbed form with one."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mlaflax.cache import HotTier, LatentCache, Pages
from mlaflax.config import ModelConfig
from mlaflax.formats import GAUSSIAN_CODEBOOK, Format, get_format
from mlaflax.model.layers import RMSNorm, normal, rms_normalize
from mlaflax.model.rope import apply_rope, softmax_scale
from mlaflax.model.tokens import Tokens
from mlaflax.ops.attention import attention, tiered_attention
from mlaflax.ops.mla_decode import merge_lse, mla_decode
from mlaflax.ops.mla_prefill import is_cheaper, mla_prefill
from mlaflax.sharding import param


class Codebook(nnx.Variable):
    """The 16 levels of a layer's latents under the cache format `nuq4`: calibrated, not learned by gradients."""


class MLA(nnx.Module):
    """Latent attention.

    The cache entry of a token is its latent, RMS-normalised but before the norm's weight (the stored
    basis, where all rounding happens), and its rotated rope key. The weight acts on what is read back.

    Parameters, float32: `q [d, h, n+r]`, or `q_down [d, l]`, `q_norm`, `q_up [l, h, n+r]`; `kv_down
    [d, c+r]`; `kv_norm [c]`; `k_up [h, n, c]`, `v_up [h, v, c]` (head first, so that neither form
    transposes them); `out [h, v, d]`. With the cache format `nuq4` there is `codebook [16]`, a
    `Codebook`; it is None with all others.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        a, d, std = config.latent_attention, config.hidden_size, config.init_std
        h, c, l = a.num_heads, a.kv_lora_rank, a.q_lora_rank
        if l:
            self.q_down = param(normal(rngs, (d, l), std), "embed", "q_lora")
            self.q_norm = RMSNorm(l, a.latent_norm_eps, axis="q_lora")
            self.q_up = param(normal(rngs, (l, h, a.qk_head_dim), std), "q_lora", "heads", "head_dim")
        else:
            self.q = param(normal(rngs, (d, h, a.qk_head_dim), std), "embed", "heads", "head_dim")
        self.kv_down = param(normal(rngs, (d, c + a.qk_rope_head_dim), std), "embed", "kv_lora")
        self.kv_norm = RMSNorm(c, a.latent_norm_eps, axis="kv_lora")
        self.k_up = param(normal(rngs, (h, a.qk_nope_head_dim, c), std), "heads", "head_dim", "kv_lora")
        self.v_up = param(normal(rngs, (h, a.v_head_dim, c), std), "heads", "head_dim", "kv_lora")
        self.out = param(normal(rngs, (h, a.v_head_dim, d), std), "heads", "head_dim", "embed")
        self.config = a
        self.cache_format, self.rope_format, self.mixed = (
            config.cache_format,
            config.rope_format,
            config.mixed,
        )
        levels = jnp.asarray(GAUSSIAN_CODEBOOK)
        self.codebook = param(levels, "codebook", kind=Codebook) if config.uses_codebook else None
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
        q_nope, q_rope = self.queries(x, tokens)
        latent, rope = self.entry(x, tokens)
        if cache is None:
            with jax.named_scope("naive_attention"):
                heads = self._naive(q_nope, q_rope, latent, rope, tokens.segment_ids)
        else:
            with jax.named_scope("append"):
                cache = cache.append(layer, latent, rope, tokens.positions, tokens.valid)
            with jax.named_scope("cached_attention"):
                if cache.hot is None:
                    heads = self._cached(q_nope, q_rope, tokens, cache, layer)
                else:
                    entry = latent, rope
                    heads, hot = self._cached_in_tiers(q_nope, q_rope, entry, tokens, cache, layer)
                    cache = dataclasses.replace(cache, hot=hot)
        return jnp.einsum("bqhv,hvd->bqd", heads, self._cast(self.out)), cache

    def _cast(self, weight: nnx.Param) -> Array:
        return weight[...].astype(self.dtype)

    def queries(self, x: Array, tokens: Tokens) -> tuple[Float[Array, "b q h n"], Float[Array, "b q h r"]]:
        """Queries of all heads, without position and rotated; `x` is of the layer's dtype."""
        a = self.config
        if a.q_lora_rank:
            q = jnp.einsum("bql,lhn->bqhn", self.q_norm(x @ self._cast(self.q_down)), self._cast(self.q_up))
        else:
            q = jnp.einsum("bqd,dhn->bqhn", x, self._cast(self.q))
        q_nope, q_rope = jnp.split(q, [a.qk_nope_head_dim], axis=-1)
        return q_nope, apply_rope(q_rope, tokens.cos, tokens.sin, a.rope.convention)

    def entry(self, x: Array, tokens: Tokens) -> tuple[Float[Array, "b q c"], Float[Array, "b q r"]]:
        """What the cache keeps of each token, float32, unrounded."""
        a = self.config
        latent, rope = jnp.split(x @ self._cast(self.kv_down), [a.kv_lora_rank], axis=-1)
        latent = rms_normalize(latent.astype(jnp.float32), a.latent_norm_eps)
        return latent, apply_rope(rope, tokens.cos, tokens.sin, a.rope.convention)

    def _naive(self, q_nope, q_rope, latent, rope, segment_ids) -> Float[Array, "b q h v"]:
        q = jnp.concatenate([q_nope, q_rope.astype(self.dtype)], axis=-1)
        if self.cache_format != "mixed":
            k, v = self.expanded(get_format(self.cache_format, self.rope_format), latent, rope)
            return attention(q, k, v, segment_ids, scale=self.scale)
        hot = self.expanded(get_format(self.mixed.hot), latent, rope)
        cold = None
        if self.mixed.cold != "none":
            cold = self.expanded(get_format(self.mixed.cold, self.rope_format), latent, rope)
        out, _ = tiered_attention(q, hot, cold, segment_ids, scale=self.scale, config=self.mixed)
        return out

    def expanded(self, fmt: Format, latent, rope) -> tuple[Float[Array, "b k h n"], Float[Array, "b k h v"]]:
        """Keys and values of all heads, from what a cache of that format would hand back."""
        codebook = self.codebook[...] if self.codebook is not None and fmt.codebook else None
        latent, rope = fmt.simulate(latent, rope, codebook)
        latent = (latent * self.kv_norm.scale[...]).astype(self.dtype)
        k_nope = jnp.einsum("bkc,hnc->bkhn", latent, self._cast(self.k_up))
        v = jnp.einsum("bkc,hvc->bkhv", latent, self._cast(self.v_up))
        rope = jnp.broadcast_to(rope[:, :, None].astype(self.dtype), (*k_nope.shape[:3], rope.shape[-1]))
        return jnp.concatenate([k_nope, rope], axis=-1), v

    def _cached(self, q_nope, q_rope, tokens: Tokens, cache: LatentCache, layer) -> Float[Array, "b q h v"]:
        q_pos = jnp.where(tokens.valid, tokens.positions, -1)
        pages = Pages(cache.layer_pool(layer), cache.layer_table(layer), cache.page_pos(), None)
        return self._attend(q_nope, q_rope, q_pos, (pages, cache.format))[0]

    def _attend(
        self, q_nope, q_rope, q_pos, *sources: tuple[Pages, Format]
    ) -> tuple[Float[Array, "b q h v"], Float[Array, "b q h"]]:
        """Attend to pages of the cache: absorbed for a few queries, their latents expanded for many.

        Returns the heads' outputs and the log-sum-exp of their scores, over all sources together.
        """
        a = self.config
        weight = self.kv_norm.scale[...]
        if is_cheaper(q_nope.shape[1], a.kv_lora_rank, a.qk_nope_head_dim, a.qk_rope_head_dim, a.v_head_dim):
            q = jnp.concatenate([q_nope.astype(jnp.float32), q_rope], axis=-1)
            k_up, v_up = self.k_up[...] * weight, self.v_up[...] * weight
            out, lse = _merged(
                mla_prefill(q, q_pos, k_up, v_up, *pages, format=fmt, scale=self.scale)
                for pages, fmt in sources
            )
            return out.astype(self.dtype), lse
        q = self._absorbed(q_nope, q_rope)
        out, lse = _merged(
            mla_decode(q, q_pos, *pages, format=fmt, scale=self.scale) for pages, fmt in sources
        )
        return jnp.einsum("bqhc,hvc->bqhv", (out * weight).astype(self.dtype), self._cast(self.v_up)), lse

    def _absorbed(self, q_nope, q_rope) -> Float[Array, "b q h c+r"]:
        # The norm's weight acts on the c dims of query and output: cheaper than on every cached latent.
        q_latent = jnp.einsum("bqhn,hnc->bqhc", q_nope, self._cast(self.k_up))
        return jnp.concatenate([q_latent.astype(jnp.float32) * self.kv_norm.scale[...], q_rope], axis=-1)

    def _cached_in_tiers(
        self, q_nope, q_rope, entry, tokens: Tokens, cache: LatentCache, layer
    ) -> tuple[Float[Array, "b q h v"], HotTier]:
        """Attend to a cache with a hot tier, page by page of the sequences, for each page has its own window.

        `cache` has the tokens in its cold pages already; the hot tier returned has them, too.
        """
        assert cache.hot is not None
        pool, table, page_pos = cache.layer_pool(layer), cache.layer_table(layer), cache.page_pos()
        size, (b, length) = cache.hot.config.page, tokens.positions.shape

        def attend(hot: HotTier, page, q_nope, q_rope, entry, positions, valid):
            """Queries of one page per sequence; the first is the page's first if all of the page is at hand."""
            hot = hot.begin_page(layer, positions[:, 0], valid[:, 0])
            hot = hot.append(layer, entry[0], entry[1], positions, valid)
            q_pos = jnp.where(valid, positions, -1)
            near = hot.pages(layer, page)
            far_pos, unkept = hot.reads_cold(layer, page, page_pos)
            far = Pages(pool, table, far_pos, unkept)
            heads, lse = self._attend(q_nope, q_rope, q_pos, (near, hot.format), (far, cache.format))
            if hot.config.salient:
                every = hot.config.probe_stride if length > 1 else 1
                probing = self._absorbed(q_nope[:, ::every], q_rope[:, ::every])
                hot = hot.measure(layer, page, probing, q_pos[:, ::every], lse[:, ::every], self.scale)
            return hot, heads

        if length == 1:
            page = tokens.positions[:, 0] // size
            hot, heads = attend(cache.hot, page, q_nope, q_rope, entry, tokens.positions, tokens.valid)
            return heads, hot

        # Positions count up from the first valid token on.
        anchor = jnp.argmax(tokens.valid, axis=1).astype(jnp.int32)
        start = jnp.take_along_axis(tokens.positions, anchor[:, None], axis=1)[:, 0] - anchor

        def one_page(i, carry):
            hot, heads = carry
            page = jnp.maximum(start, 0) // size + i
            index = (page * size - start)[:, None] + jnp.arange(size)
            inside = (index >= 0) & (index < length)
            take = jnp.clip(index, 0, length - 1)

            def of_page(x: Array) -> Array:
                return jnp.take_along_axis(x, take.reshape(*take.shape, *[1] * (x.ndim - 2)), axis=1)

            q_n, q_r, valid = of_page(q_nope), of_page(q_rope), of_page(tokens.valid) & inside
            these = of_page(entry[0]), of_page(entry[1])
            hot, out = attend(hot, page, q_n, q_r, these, start[:, None] + index, valid)
            index = jnp.where(inside, index, length)
            return hot, heads.at[jnp.arange(b)[:, None], index].set(out, mode="drop")

        heads = jnp.zeros((b, length, self.config.num_heads, self.config.v_head_dim), self.dtype)
        pages = (length + size - 2) // size + 1  # as many as `length` tokens in a row can touch
        hot, heads = jax.lax.fori_loop(0, pages, one_page, (cache.hot, heads))
        return heads, hot


def _merged(results) -> tuple[Array, Array]:
    results = list(results)
    return results[0] if len(results) == 1 else merge_lse(*results)
