"""The decoder: embedding, dense layers, mixture-of-experts layers, final norm, head."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from mlaflax.cache import LatentCache
from mlaflax.config import GQAConfig, ModelConfig, Remat, require
from mlaflax.formats import CODEBOOK_SIZE
from mlaflax.model.gqa import GQA
from mlaflax.model.layers import RMSNorm, SwiGLU, normal
from mlaflax.model.mla import MLA, Codebook
from mlaflax.model.moe import MoE, MoEStats
from mlaflax.model.rope import rope_tables
from mlaflax.model.rotation import rotate_latents
from mlaflax.model.tokens import Tokens
from mlaflax.sharding import param, state_shardings


class Output(NamedTuple):
    """What a call of the model returns.

    Attributes:
      hidden: after the final norm; `Transformer.logits` turns it into logits where they are wanted.
      cache: the cache with the tokens appended, or None.
      aux: `expert_load` float32 `[moe layers, e]`, `sequence_loss` and `z_loss` float32 scalars.
    """

    hidden: Float[Array, "b q d"]
    cache: LatentCache | None
    aux: dict[str, Array]


class Layer(nnx.Module):
    """Pre-norm residual layer: attention, then `mlp` (dense) or `moe`."""

    def __init__(self, config: ModelConfig, *, moe: bool, rngs: nnx.Rngs):
        dtype, std = jnp.dtype(config.dtype), config.init_std
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        if isinstance(config.attention, GQAConfig):
            self.attn = GQA(config, config.attention, rngs=rngs)
        else:
            self.attn = MLA(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        if moe:
            self.moe = MoE(config.hidden_size, config.moe, dtype=dtype, init_std=std, rngs=rngs)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.mlp_size, dtype=dtype, init_std=std, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b q d"], tokens: Tokens, cache: LatentCache | None, layer: Int[Array, ""] | int
    ) -> tuple[Float[Array, "b q d"], LatentCache | None, MoEStats | None]:
        with jax.named_scope("attention"):
            y, cache = self.attn(self.attn_norm(x), tokens, cache, layer)
        x = x + y
        with jax.named_scope("mlp"):
            if hasattr(self, "moe"):
                y, stats = self.moe(self.mlp_norm(x), tokens.valid)
            else:
                y, stats = self.mlp(self.mlp_norm(x)), None
        return x + y, cache, stats


def stack_layers(config: ModelConfig, count: int, *, moe: bool, rngs: nnx.Rngs) -> Layer:
    """`count` layers as one module whose arrays have a leading layer axis."""

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def create(rngs: nnx.Rngs) -> Layer:
        return Layer(config, moe=moe, rngs=rngs)

    return create(rngs)


_REMAT: dict[Remat, Callable[[Callable], Callable]] = {
    "none": lambda f: f,
    "dots": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "full": jax.checkpoint,
}


class Transformer(nnx.Module):
    """A decoder language model; see `ModelConfig`.

    Layers are stacked and scanned. `unstacked` gives the form that serves fastest, with one module per
    layer; both forms give the same numbers.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d, w = config.hidden_size, config.vocab_size
        self.config = config
        self.embed = param(normal(rngs, (w, d), config.init_std), "vocab", "embed")
        dense, moe = config.num_dense_layers, config.num_moe_layers
        self.dense_layers = stack_layers(config, dense, moe=False, rngs=rngs) if dense else None
        self.moe_layers = stack_layers(config, moe, moe=True, rngs=rngs) if moe else None
        self.final_norm = RMSNorm(d, config.norm_eps)
        if not config.tie_embeddings:
            self.head = param(normal(rngs, (d, w), config.init_std), "embed", "vocab")

    def __call__(
        self,
        tokens: Int[Array, "b q"] | Float[Array, "b q d"],
        positions: Int[Array, "b q"] | None = None,
        segment_ids: Int[Array, "b q"] | None = None,
        *,
        cache: LatentCache | None = None,
    ) -> Output:
        """Run the decoder.

        Args:
          tokens: token ids, or embeddings.
          positions: of each token in its document; default 0, 1, ...
          segment_ids: 0 for padding, 1, 2, ... for packed documents; default all 1. With a cache, each
            row is one sequence: anything above 0 is a token of it.
          cache: append to it and attend to it (absorbed form); None is the training graph.
        """
        b, q = tokens.shape[:2]
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(q, dtype=jnp.int32), (b, q))
        if segment_ids is None:
            segment_ids = jnp.ones((b, q), jnp.int32)
        attention = self.config.attention
        cos, sin = rope_tables(attention.rope, attention.rope_dim, positions)
        info = Tokens(positions, segment_ids, cos, sin)

        dtype = jnp.dtype(self.config.dtype)
        embedded = tokens.ndim == 3
        x = tokens.astype(dtype) if embedded else jnp.take(self.embed[...], tokens, axis=0).astype(dtype)
        stats = None
        first = 0
        for layers, count in (
            (self.dense_layers, self.config.num_dense_layers),
            (self.moe_layers, self.config.num_moe_layers),
        ):
            if layers is not None:
                x, cache, stats = self._run(layers, x, info, cache, first, count)
                first += count
        return Output(self.final_norm(x), cache, self._aux(stats))

    def _run(self, layers: Any, x: Array, info: Tokens, cache: LatentCache | None, first: int, count: int):
        """Run `count` layers whose indices in the cache start at `first`."""
        remat = _REMAT[self.config.remat] if cache is None else _REMAT["none"]
        if isinstance(layers, nnx.List):
            collected = []
            for i, layer in enumerate(layers):
                x, cache, stats = layer(x, info, cache, first + i)
                collected.append(stats)
            stacked = None if collected[0] is None else jax.tree.map(lambda *s: jnp.stack(s), *collected)
            return x, cache, stacked

        graph, state = nnx.split(layers)

        @remat
        def step(carry, indexed):
            x, cache = carry
            layer, state = indexed
            x, cache, stats = nnx.merge(graph, state)(x, info, cache, layer)
            return (x, cache), stats

        (x, cache), stats = jax.lax.scan(step, (x, cache), (first + jnp.arange(count), state))
        return x, cache, stats

    def _aux(self, stats: MoEStats | None) -> dict[str, Array]:
        if stats is None:
            e = self.config.moe.num_experts
            return {"expert_load": jnp.zeros((0, e)), "sequence_loss": jnp.zeros(()), "z_loss": jnp.zeros(())}
        return {
            "expert_load": stats.expert_load,
            "sequence_loss": jnp.sum(stats.sequence_loss),
            "z_loss": jnp.sum(stats.z_loss),
        }

    def logits(self, hidden: Float[Array, "... d"]) -> Float[Array, "... w"]:
        """Logits in float32, products in the model's dtype."""
        hidden = hidden.astype(jnp.dtype(self.config.dtype))
        if self.config.tie_embeddings:
            weight, subscripts = self.embed, "...d,wd->...w"
        else:
            weight, subscripts = self.head, "...d,dw->...w"
        return jnp.einsum(
            subscripts, hidden, weight[...].astype(hidden.dtype), preferred_element_type=jnp.float32
        )

    def codebooks(self) -> Float[Array, "layers 16"] | None:
        """The codebook of each layer, for a cache of the format `nuq4`; None if the model is of another format."""
        rows = []
        for layers in (self.dense_layers, self.moe_layers):
            for layer in layers if isinstance(layers, nnx.List) else [layers] if layers else []:
                if layer.attn.codebook is None:
                    return None
                rows.append(jnp.reshape(layer.attn.codebook[...], (-1, CODEBOOK_SIZE)))
        return jnp.concatenate(rows)

    def with_codebooks(self, levels: Float[Array, "layers 16"]) -> "Transformer":
        """The same weights with these codebooks, dense layers first, for the format `nuq4`."""
        assert self.config.latent_attention  # else it says what is wrong
        model = nnx.merge(*nnx.split(self))
        levels = jnp.asarray(levels, jnp.float32)
        require(
            levels.shape == (self.config.num_layers, CODEBOOK_SIZE),
            "codebooks",
            levels.shape,
            f"must be of shape {(self.config.num_layers, CODEBOOK_SIZE)}",
        )
        dense = self.config.num_dense_layers
        for layers, rows in ((model.dense_layers, levels[:dense]), (model.moe_layers, levels[dense:])):
            if isinstance(layers, nnx.List):
                for layer, row in zip(layers, rows, strict=True):
                    layer.attn.codebook = nnx.data(param(row, "codebook", kind=Codebook))
            elif layers is not None:
                layers.attn.codebook = nnx.data(param(rows, "layers", "codebook", kind=Codebook))
        return model

    def rotated(self) -> "Transformer":
        """The same function, whose latents are stored rotated; see `mlaflax.model.rotation`."""
        graph, params, rest = nnx.split(self, nnx.Param, ...)
        turned = rotate_latents(nnx.to_pure_dict(params), self.config.latent_attention.kv_lora_rank)
        nnx.replace_by_pure_dict(params, turned)
        return nnx.merge(graph, params, rest)

    def simulating(self, **cache: Any) -> "Transformer":
        """The same weights, with a training graph that rounds as another cache would.

        Args:
          cache: `cache_format`, `rope_format` and `mixed` as in `ModelConfig`; those left out stay.

        Raises:
          ConfigError: a format that the model's cache entries do not fit.
        """
        model = nnx.merge(*nnx.split(self))
        model.config = dataclasses.replace(self.config, **cache)
        for _, module in nnx.iter_modules(model):
            if isinstance(module, GQA):
                module.cache_format = model.config.cache_format
            elif isinstance(module, MLA):
                module.cache_format, module.rope_format, module.mixed = (
                    getattr(model.config, name) for name in ("cache_format", "rope_format", "mixed")
                )
        return model

    def unstacked(self) -> "Transformer":
        """The same weights with one module per layer.

        A scan over stacked weights copies each layer's weights before it multiplies with them: half as
        much again for a decode step on CPU. Compile time then grows with depth.
        """
        graph, state = nnx.split(self)
        model = nnx.merge(graph, state)
        for name, count in (
            ("dense_layers", self.config.num_dense_layers),
            ("moe_layers", self.config.num_moe_layers),
        ):
            layers = getattr(model, name)
            if layers is None or isinstance(layers, nnx.List):
                continue
            graph, state = nnx.split(layers)
            setattr(
                model,
                name,
                nnx.List([nnx.merge(graph, jax.tree.map(lambda x, i=i: x[i], state)) for i in range(count)]),
            )
        return model


def init_model(config: ModelConfig, seed: int = 0, mesh: Mesh | None = None) -> Transformer:
    """A freshly initialised model, created under one jit; with a mesh, born sharded on it.

    Args:
      seed: of the weights; the same seed gives the same weights on any mesh.
      mesh: with the axes of `mlaflax.sharding.MESH_AXES`; None leaves everything on the default device.
    """

    def create() -> nnx.State:
        return nnx.state(Transformer(config, rngs=nnx.Rngs(seed)))

    abstract = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(seed)))
    graph, abstract_state = nnx.split(abstract)
    shardings = None if mesh is None else state_shardings(abstract_state, mesh)
    return nnx.merge(graph, jax.jit(create, out_shardings=shardings)())
