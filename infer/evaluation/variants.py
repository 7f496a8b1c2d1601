"""Variants: the cache formats to compare, as a command line spells them.

    f32   bf16   fp8   int8   fp4   nuq4   mixed
    fp4:rope=fp8   mixed:hot=fp8   mixed:cold=nuq4,window=256,salient=0

After the colon come `rope`, the rope key's own format, and, for `mixed`, fields of `MixedConfig`; those left out
are the checkpoint's.
"""

import dataclasses
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from mlaflax.cache import LatentCache
from mlaflax.cache.latent import pool_format
from mlaflax.cli import nearest
from mlaflax.config import (
    SCALED_FORMATS,
    CacheFormat,
    ConfigError,
    MixedConfig,
    ModelConfig,
    RopeFormat,
    require,
    require_cache_format,
    require_choice,
)
from mlaflax.formats import get_format
from mlaflax.model import Transformer

BASELINE = "bf16"
FAR_WINDOWS = 8


@dataclasses.dataclass(frozen=True)
class Variant:
    """A cache to compare.

    Attributes:
      name: as the command line spells it.
      cache_format: of the latent.
      rope_format: of the rope key.
      mixed: tiers of the format `mixed`; no matter to the others.
    """

    name: str
    cache_format: CacheFormat
    rope_format: RopeFormat
    mixed: MixedConfig

    @property
    def tiered(self) -> bool:
        return self.cache_format == "mixed"

    @property
    def served(self) -> bool:
        """Whether a real cache can hold it; some are only for the training graph to simulate."""
        return not self.tiered or self.mixed.cold != "none"

    def config(self, model: ModelConfig) -> ModelConfig:
        """The model's configuration with this cache.

        Raises:
          ConfigError: they do not fit each other.
        """
        return dataclasses.replace(
            model, cache_format=self.cache_format, rope_format=self.rope_format, mixed=self.mixed
        )

    def simulated(self, model: Transformer) -> Transformer:
        """The same weights; the training graph rounds as this cache would."""
        return model.simulating(
            cache_format=self.cache_format, rope_format=self.rope_format, mixed=self.mixed
        )

    def cache(self, model: Transformer | ModelConfig, length: int, *, num_sequences: int = 1) -> LatentCache:
        """An empty cache for sequences of up to `length` tokens; with a model, with that model's codebooks."""
        codebook = None
        if isinstance(model, Transformer):
            if get_format(pool_format(self.config(model.config), self.cache_format)).codebook:
                codebook = model.codebooks()
            model = model.config
        return LatentCache.create(
            self.config(model), self.cache_format, num_sequences=num_sequences, max_length=length,
            rope_format=self.rope_format, codebook=codebook,
        )  # fmt: skip

    def bytes_per_token(self, config: ModelConfig, length: int) -> float | None:
        """Bytes of every array of a cache for one sequence of `length` tokens, per token; None if not served."""
        if not self.served:
            return None
        shapes = jax.eval_shape(lambda: self.cache(config, length))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)) / length


def parse_variant(spelled: str, config: ModelConfig) -> Variant:
    """The variant that `spelled` names, for a model of this configuration.

    Raises:
      ConfigError: an unknown format or field, or a value that the format or the model does not allow.
    """
    name, colon, rest = spelled.partition(":")
    known = typing.get_args(CacheFormat)
    if name not in known:
        raise ConfigError(f"formats = {spelled!r}: no cache format {name!r}; {nearest(name, known)}")
    require(
        bool(rest) or not colon, "formats", spelled, "must name a field after the colon, NAME:field=value"
    )
    rope = config.rope_format if name in SCALED_FORMATS else "bf16"
    changes: dict[str, Any] = {}
    hints = typing.get_type_hints(MixedConfig)
    fields = ["rope", *(f.name for f in dataclasses.fields(MixedConfig))] if name == "mixed" else ["rope"]
    for part in rest.split(",") if rest else []:
        field, equals, value = part.partition("=")
        require(bool(equals), "formats", spelled, f"must give {field!r} a value, as in {name}:{field}=VALUE")
        if field not in fields:
            raise ConfigError(
                f"formats = {spelled!r}: {field!r} is not a field of {name}; {nearest(field, fields)}"
            )
        require(
            field not in changes and (field != "rope" or "rope=" not in rest.split(part, 1)[1]),
            "formats", spelled, f"gives {field!r} twice",
        )  # fmt: skip
        if field == "rope":
            require_choice("rope", value, RopeFormat)
            rope = value
        elif hints[field] is int:
            require(value.isdecimal(), "formats", spelled, f"{field} must be a whole number, 0 or more")
            changes[field] = int(value)
        else:
            changes[field] = value
    require_cache_format(name, rope)
    variant = Variant(spelled, name, rope, dataclasses.replace(config.mixed, **changes))  # pyright: ignore[reportArgumentType]
    _require_fit(variant, config)
    return variant


def _require_fit(variant: Variant, config: ModelConfig) -> None:
    fitted = variant.config(config)
    if variant.served:
        attention = config.attention
        try:
            get_format(pool_format(fitted, variant.cache_format), variant.rope_format).parts(
                *attention.cache_dims
            )
        except ConfigError as error:
            raise ConfigError(f"formats = {variant.name!r}: {error}") from None


def parse_variants(spelled: Sequence[str], config: ModelConfig) -> list[Variant]:
    """The variants to compare, the baseline first, each once; with none spelled, every format the model fits.

    Raises:
      ConfigError: as `parse_variant`.
    """
    if spelled:
        return [parse_variant(name, config) for name in dict.fromkeys([BASELINE, *spelled])]
    found = []
    for name in dict.fromkeys([BASELINE, *typing.get_args(CacheFormat)]):
        try:
            found.append(parse_variant(name, config))
        except ConfigError:
            continue  # of all formats those that hold this model's latents
    return found


def far_from(variants: Iterable[Variant], context: int) -> int | None:
    """The first position with eight windows of the first mixed variant before it; None without such a variant.

    Raises:
      ConfigError: there is no whole page of such positions in `context` tokens.
    """
    mixed = next((v.mixed for v in variants if v.tiered), None)
    if mixed is None:
        return None
    least = FAR_WINDOWS * mixed.window + mixed.page
    require(
        context >= least,
        "context",
        context,
        f"must be at least {least}: {FAR_WINDOWS} windows of {mixed.window} tokens and a page of {mixed.page}",
    )
    return FAR_WINDOWS * mixed.window
