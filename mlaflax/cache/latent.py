"""The cache as one pytree: packed pages of every layer in one flat pool, and the block tables."""

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mlaflax.cache.hot import HotTier, empty_pages
from mlaflax.config import ModelConfig, require, require_cache_format
from mlaflax.formats import CODEBOOK_SIZE, GAUSSIAN_CODEBOOK, Format, get_format

PAGE_SIZE = 128


def default_page_size(config: ModelConfig, format: str) -> int:
    """Tokens in a page of a cache of that format."""
    return config.mixed.page if format == "mixed" else PAGE_SIZE


def pool_format(config: ModelConfig, format: str) -> str:
    """The number format of the pages of a cache of that format: the cold one of `mixed`."""
    name = config.mixed.cold if format == "mixed" else format
    require(name != "none", "mixed.cold", name, "only simulates: a cache must hold its cold tokens")
    return name


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pool", "block_table", "codebook", "hot"],
    meta_fields=["format_name", "pages_per_layer", "rope_format"],
)
@dataclasses.dataclass(frozen=True)
class LatentCache:
    """Pages of `t` tokens over all layers.

    With grouped-query attention each KV head of each layer has a share of the pool, as a layer has with latent
    attention, and an entry is the head's value, in the place of a latent, and its rotated key, in the place of a
    rope key; `per_head` shows them as sequences of one layer.

    Attributes:
      pool: the format's parts, `[layers * pages_per_layer, t, size]` or `[..., size, t]`; layer `l`
        owns the pages from `l * pages_per_layer` on, KV head `i` of `g` those from `(l * g + i) * pages_per_layer`
        on. Flat, because slicing one layer out of `[layers, pages, ...]` inside a loop over layers copies that
        layer's pool.
      block_table: int32 `[b, p]`, the page that holds positions `i * t` to `(i + 1) * t - 1` of each
        sequence, numbered within a layer; -1 where there is none yet.
      format_name: the number format, see `mlaflax.formats`.
      pages_per_layer: pages in each layer's share of the pool.
      rope_format: the rope key's own format, `bf16` (f32 in the format `f32`) or `fp8`.
      codebook: float32 `[layers, 16]`, None where the format needs none.
      hot: 8-bit copies of some tokens, of the `mixed` format only; the pool then holds its cold format.
    """

    pool: dict[str, Array]
    block_table: Int[Array, "b p"]
    format_name: str
    pages_per_layer: int
    rope_format: str = "bf16"
    codebook: Float[Array, "layers 16"] | None = None
    hot: HotTier | None = None

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        format: str,
        *,
        num_sequences: int,
        max_length: int,
        num_pages: int | None = None,
        page_size: int | None = None,
        rope_format: str = "bf16",
        codebook: Float[Array, "layers 16"] | None = None,
    ) -> Self:
        """An empty cache of one of `mlaflax.config.CacheFormat`.

        With `num_pages` None there are pages for every sequence at full length and the block tables
        already point at them; with a number, the tables start empty and the caller hands pages out
        (`PageAllocator`). Pages hold `page_size` tokens, by default `default_page_size(config, format)`. A
        format that needs a codebook takes the Gaussian one for every layer where none is given.

        Raises:
          ConfigError: a size that is not positive, a format that does not fit the model, or a codebook
            that does not fit the format.
        """
        require_cache_format(format, rope_format, config.attention)
        usual = default_page_size(config, format)
        page_size = usual if page_size is None else page_size
        if format == "mixed":
            require(page_size == usual, "page_size", page_size, f"must be mixed.page ({usual})")
        require(num_sequences > 0, "num_sequences", num_sequences, "must be greater than 0")
        require(max_length > 0, "max_length", max_length, "must be greater than 0")
        require(page_size > 0, "page_size", page_size, "must be greater than 0")
        per_sequence = -(-max_length // page_size)
        if num_pages is None:
            num_pages = num_sequences * per_sequence
            table = jnp.arange(num_pages, dtype=jnp.int32).reshape(num_sequences, per_sequence)
        else:
            table = jnp.full((num_sequences, per_sequence), -1, jnp.int32)
        attention = config.attention
        hot = None
        if format == "mixed":
            hot = HotTier.create(
                config.mixed,
                config.latent_attention,
                num_layers=config.num_layers,
                num_sequences=num_sequences,
            )
        format = pool_format(config, format)
        fmt = get_format(format, rope_format)
        parts = fmt.parts(*attention.cache_dims)
        if fmt.codebook:
            shape = (config.num_layers, CODEBOOK_SIZE)
            default = jnp.broadcast_to(GAUSSIAN_CODEBOOK, shape)
            # A copy: steps that update the cache in place consume its arrays.
            codebook = jnp.array(default if codebook is None else codebook, jnp.float32)
            require(codebook.shape == shape, "codebook", codebook.shape, f"must be of shape {shape}")
        else:
            require(codebook is None, "codebook", "an array", f"must be None: format {format} needs none")
        pool = empty_pages(parts, config.num_layers * attention.cache_heads * num_pages, page_size)
        return cls(pool, table, format, num_pages, rope_format, codebook, hot)

    @property
    def format(self) -> Format:
        return get_format(self.format_name, self.rope_format)

    @property
    def page_size(self) -> int:
        return self.pool["rope"].shape[-1]

    @property
    def max_length(self) -> int:
        """Longest sequence, in tokens, that a block table has room for."""
        return self.block_table.shape[1] * self.page_size

    def nbytes(self) -> int:
        """Bytes of every array that exists: pool, block table, codebook and hot tier."""
        return sum(array.nbytes for array in jax.tree.leaves(self))

    def of_sequence(self, sequence: Int[Array, ""]) -> Self:
        """The same cache as calls with one row see it that belongs to one sequence."""
        one = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=sequence, slice_size=1)
        hot = self.hot and dataclasses.replace(self.hot, slots=one(self.hot.slots))
        return dataclasses.replace(self, block_table=one(self.block_table), hot=hot)

    def of_all(self, whole: Self) -> Self:
        """This cache, got by `of_sequence` or `per_head` and then written to, with the rows of `whole` again."""
        hot = self.hot and whole.hot and dataclasses.replace(self.hot, slots=whole.hot.slots)
        return dataclasses.replace(self, block_table=whole.block_table, hot=hot)

    def per_head(self, layer: Int[Array, ""] | int, heads: int) -> Self:
        """The same pool as a cache of one layer, whose sequences are the `heads` KV heads of each sequence in turn.

        What is appended to it as to its layer 0 reaches the pool of this one by `of_all`.
        """
        first = (layer * heads + jnp.arange(heads, dtype=jnp.int32)) * self.pages_per_layer
        table = self.block_table[:, None]
        table = jnp.where(table >= 0, table + first[:, None], -1)
        return dataclasses.replace(self, block_table=table.reshape(-1, table.shape[-1]))

    def page_pos(self) -> Int[Array, "b p"]:
        """Position of each page's first token, -1 for an unused entry."""
        first = jnp.arange(self.block_table.shape[1], dtype=jnp.int32) * self.page_size
        return jnp.where(self.block_table >= 0, first, -1)

    def layer_table(self, layer: Int[Array, ""] | int) -> Int[Array, "b p"]:
        """The block table with ids offset to that layer's pages, as `mla_decode` takes it."""
        return jnp.where(self.block_table >= 0, self.block_table + layer * self.pages_per_layer, -1)

    def layer_codebook(self, layer: Int[Array, ""] | int) -> Float[Array, "16"] | None:
        return None if self.codebook is None else self.codebook[layer]

    def layer_pool(self, layer: Int[Array, ""] | int) -> dict[str, Array]:
        """What `mla_decode` reads with `layer_table`: the whole pool, and that layer's codebook if there is one."""
        codebook = self.layer_codebook(layer)
        return self.pool if codebook is None else {**self.pool, "codebook": codebook}

    def append(
        self,
        layer: Int[Array, ""] | int,
        latent: Float[Array, "b q c"],
        rope: Float[Array, "b q r"],
        positions: Int[Array, "b q"],
        valid: Bool[Array, "b q"],
    ) -> Self:
        """Write tokens of one layer, float32 in the stored basis, at their positions.

        Tokens that are not `valid`, and positions without a page, are dropped.
        """
        page = jnp.take_along_axis(
            self.layer_table(layer),
            jnp.clip(positions // self.page_size, 0, self.block_table.shape[1] - 1),
            axis=1,
        )
        keep = valid & (positions >= 0) & (positions < self.max_length) & (page >= 0)
        # An index past the end: scatter drops it.
        page = jnp.where(keep, page, self.pool["rope"].shape[0])
        offset = positions % self.page_size
        parts = self.format.parts(latent.shape[-1], rope.shape[-1])
        packed = self.format.pack(latent, rope, self.layer_codebook(layer))
        pool = {}
        for name, array in self.pool.items():
            at = array.at[page, offset] if parts[name].token_major else array.at[page, :, offset]
            pool[name] = at.set(packed[name], mode="drop")
        return dataclasses.replace(self, pool=pool)

    def read(self, layer: int, sequence: int, length: int) -> dict[str, Array]:
        """The packed parts of one sequence's first `length` tokens in one layer, `[length, size]` each."""
        pages = -(-length // self.page_size)
        ids = self.layer_table(layer)[sequence, :pages]
        token_major = {
            name: array[ids] if name == "latent" else jnp.swapaxes(array[ids], 1, 2)
            for name, array in self.pool.items()
        }
        return {
            name: array.reshape(pages * self.page_size, -1)[:length] for name, array in token_major.items()
        }
