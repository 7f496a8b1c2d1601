"""The hot tier of the mixed cache: 8-bit copies of the tokens that matter most, per sequence and layer.

Each sequence has, in each layer, `ring` pages for its newest tokens (the page at hand and the window before it) and
`kept_pages` for sinks and, behind them, salient tokens. All of them are pages of one flat pool, read by the ops that
read every other page. Sinks are written to both places at once; which others are kept is the rule of
`mlaflax.salience`.

A call goes page by page: `begin_page`, `append`, attend to `pages` and to what `reads_cold` leaves of the cold
pages, `measure`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mlaflax.config import AttentionConfig, MixedConfig
from mlaflax.formats import Format, Part, get_format
from mlaflax.ops.mla_decode.pages import read_pages, visible_keys
from mlaflax.salience import salience, sink_index, strongest


class Pages(NamedTuple):
    """Some pages to attend to, as the ops take them."""

    pool: Mapping[str, Array]
    block_table: Int[Array, "b p"]
    page_pos: Int[Array, "b p"]
    mask: Bool[Array, "b p t"] | None = None


def empty_pages(parts: Mapping[str, Part], pages: int, page_size: int) -> dict[str, Array]:
    """Zeroed pages of a format."""
    return {
        name: jnp.zeros(
            (pages, page_size, part.size) if part.token_major else (pages, part.size, page_size), part.dtype
        )
        for name, part in parts.items()
    }


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pool", "index", "mass", "slots"],
    meta_fields=["config", "num_sequences"],
)
@dataclasses.dataclass(frozen=True)
class HotTier:
    """8-bit copies, of every layer and sequence.

    Attributes:
      pool: parts of the hot format, `[layers * sequences * pages, t, size]` or `[..., size, t]`: for each layer
        and sequence the ring, then the kept pages.
      index: int32 `[layers * sequences, e]`, index in its sequence of each salient token, -1 for none.
      mass: float32 `[layers * sequences, ring * t + e]`, attention measured so far of each token in the ring and
        of each salient one; without salient tokens there is none of it.
      slots: int32 `[b]`, the sequence that each row of a call belongs to.
      config: sizes and formats.
      num_sequences: sequences that there is room for.
    """

    pool: dict[str, Array]
    index: Int[Array, "ls e"]
    mass: Float[Array, "ls k"]
    slots: Int[Array, " b"]
    config: MixedConfig
    num_sequences: int

    @classmethod
    def create(
        cls, config: MixedConfig, attention: AttentionConfig, *, num_layers: int, num_sequences: int
    ) -> Self:
        parts = get_format(config.hot).parts(attention.kv_lora_rank, attention.qk_rope_head_dim)
        rows = num_layers * num_sequences
        return cls(
            pool=empty_pages(parts, rows * (config.ring + config.kept_pages), config.page),
            index=jnp.full((rows, config.salient), -1, jnp.int32),
            mass=jnp.zeros((rows, config.measured), jnp.float32),
            slots=jnp.arange(num_sequences, dtype=jnp.int32),
            config=config,
            num_sequences=num_sequences,
        )

    @property
    def format(self) -> Format:
        return get_format(self.config.hot)

    def rows(self, layer: Int[Array, ""] | int) -> Int[Array, " b"]:
        """Rows of `index` and `mass`."""
        return layer * self.num_sequences + self.slots

    def _page_ids(self, layer: Int[Array, ""] | int) -> Int[Array, "b p"]:
        each = self.config.ring + self.config.kept_pages
        return self.rows(layer)[:, None] * each + jnp.arange(each, dtype=jnp.int32)

    def begin_page(
        self, layer: Int[Array, ""] | int, position: Int[Array, " b"], begins: Bool[Array, " b"]
    ) -> Self:
        """Choose which tokens are kept from here on, where `position` is the first of a page and `begins` is set.

        Does nothing for the other sequences. Comes before the tokens of the new page, which take the place of
        the page that leaves the window.
        """
        config = self.config
        if not config.salient:
            return self
        begins &= position % config.page == 0
        rows = self.rows(layer)
        ids = self._page_ids(layer)
        kept_ids = ids[:, config.ring :]
        ring_mass = config.ring * config.page

        def choose(_):
            page = position // config.page
            leaving = page % config.ring
            mass = self.mass[rows]
            old_index = self.index[rows]
            offset = jnp.arange(config.page, dtype=jnp.int32)
            first = (page - config.ring) * config.page
            # While the ring is not full yet, nothing leaves; position 0 starts a sequence with nothing kept.
            leaving_index = jnp.where((first >= 0)[:, None], first[:, None] + offset, -1)
            old_index = jnp.where((page > 0)[:, None], old_index, -1)
            index = jnp.concatenate([old_index, leaving_index], axis=1)
            place = leaving[:, None] * config.page + offset
            worth = jnp.concatenate(
                [mass[:, ring_mass:], jnp.take_along_axis(mass, place, axis=1)], axis=1
            )  # fmt: skip
            chosen, best = strongest(salience(index, worth, page, config), config.salient)
            new_index = jnp.where(best > -jnp.inf, jnp.take_along_axis(index, chosen, axis=1), -1)
            new_mass = jnp.take_along_axis(worth, chosen, axis=1)
            sources = jnp.concatenate([kept_ids, jnp.take_along_axis(ids, leaving[:, None], axis=1)], axis=1)
            # Rows of the kept pages, sinks first, of which the last may be filled in part, then of the leaving page.
            places = config.kept_pages * config.page
            from_kept = chosen < config.salient
            source = jnp.where(from_kept, config.sinks + chosen, places - config.salient + chosen)
            same = jnp.broadcast_to(jnp.arange(places, dtype=jnp.int32), (page.shape[0], places))
            source = same.at[:, config.sinks : config.kept].set(source)
            pages = {}
            for name, part in self._parts().items():
                tokens = _token_rows(self.pool[name][sources], part)
                tokens = jnp.take_along_axis(tokens, source[..., None], axis=1)
                pages[name] = _paged(tokens, part, config.page)
            return new_index, new_mass, pages

        def keep(_):
            return (
                self.index[rows],
                self.mass[rows, ring_mass:],
                {name: array[kept_ids] for name, array in self.pool.items()},
            )

        # Small results: the pool itself must not pass through a branch, which may copy it.
        index, mass, pages = jax.lax.cond(jnp.any(begins), choose, keep, None)
        rows = jnp.where(begins, rows, self.index.shape[0])  # past the end: dropped
        kept_ids = jnp.where(begins[:, None], kept_ids, self.pool["rope"].shape[0])
        return dataclasses.replace(
            self,
            index=self.index.at[rows].set(index, mode="drop"),
            mass=self.mass.at[rows, ring_mass:].set(mass, mode="drop"),
            pool={n: array.at[kept_ids].set(pages[n], mode="drop") for n, array in self.pool.items()},
        )

    def append(
        self,
        layer: Int[Array, ""] | int,
        latent: Float[Array, "b q c"],
        rope: Float[Array, "b q r"],
        positions: Int[Array, "b q"],
        valid: Bool[Array, "b q"],
    ) -> Self:
        """Write tokens of one page per sequence into the ring, sinks to their place, too; those that are not `valid`
        are dropped.
        """
        config = self.config
        number, offset = positions // config.page, positions % config.page
        slot = number % config.ring
        ids = self._page_ids(layer)
        nowhere = self.pool["rope"].shape[0]
        page = jnp.where(valid, jnp.take_along_axis(ids, slot, axis=1), nowhere)
        packed = self.format.pack(latent, rope)
        if config.sinks:
            kept = jnp.take_along_axis(ids, config.ring + jnp.minimum(number, config.kept_pages - 1), axis=1)
            sink = jnp.where(valid & (positions < config.sinks), kept, nowhere)
            page, offset = jnp.concatenate([page, sink], axis=1), jnp.tile(offset, (1, 2))
            packed = {name: jnp.tile(part, (1, 2, 1)) for name, part in packed.items()}
        pool = {}
        for name, part in self._parts().items():
            array = self.pool[name]
            at = array.at[page, offset] if part.token_major else array.at[page, :, offset]
            pool[name] = at.set(packed[name], mode="drop")
        if not config.salient:
            return dataclasses.replace(self, pool=pool)
        offset = positions % config.page
        row = jnp.where(valid, self.rows(layer)[:, None], self.mass.shape[0])
        mass = self.mass.at[row, slot * config.page + offset].set(0.0, mode="drop")
        return dataclasses.replace(self, pool=pool, mass=mass)

    def pages(self, layer: Int[Array, ""] | int, page: Int[Array, " b"]) -> Pages:
        """What queries on page `page` of their sequence read in 8 bits."""
        config = self.config
        ring = jnp.arange(config.ring, dtype=jnp.int32)
        # The newest page that has its place there; before the ring is full there may be none.
        number = page[:, None] - (page[:, None] - ring) % config.ring
        page_pos = jnp.where(number >= 0, number * config.page, -1)
        mask = None
        if config.kept:
            b = page.shape[0]
            # Kept tokens lie anywhere before the window. Told that they are the first ones, the op finds all of
            # them before the query: a query that keeps any is past its first page.
            page_pos = jnp.concatenate([page_pos, jnp.zeros((b, config.kept_pages), jnp.int32)], axis=1)
            there = self.kept(layer, page) >= 0
            there = jnp.pad(there, ((0, 0), (0, config.kept_pages * config.page - config.kept)))
            mask = jnp.concatenate([jnp.ones((b, config.ring * config.page), bool), there], axis=1)
            mask = mask.reshape(b, -1, config.page)
        return Pages(self.pool, self._page_ids(layer), page_pos, mask)

    def reads_cold(
        self, layer: Int[Array, ""] | int, page: Int[Array, " b"], page_pos: Int[Array, "b p"]
    ) -> tuple[Int[Array, "b p"], Bool[Array, "b p t"] | None]:
        """Of the cold pages at `page_pos`, what queries on page `page` read: `page_pos` and `mask` for the op."""
        config = self.config
        before = (page - config.ring + 1)[:, None] * config.page
        page_pos = jnp.where(page_pos < before, page_pos, -1)
        if not config.kept:
            return page_pos, None
        b, p = page_pos.shape
        # All sinks: those that are not kept are in the window, of which nothing is read here.
        mask = jnp.broadcast_to(jnp.arange(p * config.page) >= config.sinks, (b, p * config.page))
        if config.salient:
            index = self.index[self.rows(layer)]
            index = jnp.where(index >= 0, index, p * config.page)
            mask = mask.at[jnp.arange(b)[:, None], index].set(False, mode="drop")
        return page_pos, mask.reshape(b, p, config.page)

    def kept(self, layer: Int[Array, ""] | int, page: Int[Array, " b"]) -> Int[Array, "b e"]:
        """Index in its sequence of each token kept for queries on page `page`, sinks first, -1 for none."""
        return jnp.concatenate([sink_index(page, self.config), self.index[self.rows(layer)]], axis=1)

    def measure(
        self,
        layer: Int[Array, ""] | int,
        page: Int[Array, " b"],
        q: Float[Array, "b q h c+r"],
        q_pos: Int[Array, "b q"],
        lse: Float[Array, "b q h"],
        scale: float,
    ) -> Self:
        """Add the attention that the tokens in 8 bits get from the probing queries among `q`.

        Args:
          page: number of the page that the queries of each sequence belong to.
          q: absorbed queries.
          q_pos: their positions, -1 for padding.
          lse: log-sum-exp of all their scaled scores, both tiers together.
        """
        config = self.config
        q_pos = jnp.where(q_pos % config.probe_stride == 0, q_pos, -1)
        pages = self.pages(layer, page)

        def attention(_):
            latent, rope = read_pages(pages.pool, pages.block_table, self.format)
            c = latent.shape[-1]
            scores = jnp.einsum("bqhc,bkc->bqhk", q[..., :c] * scale, latent)
            scores += jnp.einsum("bqhr,brk->bqhk", q[..., c:] * scale, rope)
            visible = visible_keys(q_pos, pages.page_pos, pages.mask, page_size=config.page)
            return jnp.sum(jnp.where(visible[:, :, None], jnp.exp(scores - lse[..., None]), 0.0), axis=(1, 2))

        b, hot = q.shape[0], pages.block_table.shape[1] * config.page
        got = jax.lax.cond(jnp.any(q_pos >= 0), attention, lambda _: jnp.zeros((b, hot)), None)
        ring = config.ring * config.page
        salient = got[:, ring + config.sinks : ring + config.kept]
        got = jnp.concatenate([got[:, :ring], salient], axis=1)
        return dataclasses.replace(self, mass=self.mass.at[self.rows(layer)].add(got))

    def _parts(self) -> dict[str, Part]:
        return self.format.parts(self.format.latent_dims(self.pool), self.pool["rope"].shape[-2])


def _token_rows(pages: Array, part: Part) -> Array:
    """`[b, p, t, size]`, or `[b, p, size, t]`, as rows `[b, p * t, size]`."""
    pages = pages if part.token_major else jnp.swapaxes(pages, -1, -2)
    return pages.reshape(pages.shape[0], -1, part.size)


def _paged(rows: Array, part: Part, page_size: int) -> Array:
    pages = rows.reshape(rows.shape[0], -1, page_size, part.size)
    return pages if part.token_major else jnp.swapaxes(pages, -1, -2)
