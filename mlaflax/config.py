"""Model configuration: frozen dataclasses, validated on construction.

Every misuse raises `ConfigError`, whose message names the field, its value and what is allowed.
`to_dict` and `from_dict` carry any configuration dataclass through JSON, so that a checkpoint can
rebuild the model it holds.
"""

import dataclasses
import difflib
import functools
import numbers
import types
import typing
from typing import Any, Literal, TypeVar

T = TypeVar("T")

RopeConvention = Literal["interleaved", "half"]
RopeScaling = Literal["yarn", "llama3"]
RouterScore = Literal["softmax", "sigmoid", "sqrt_softplus"]
GroupScore = Literal["max", "top2"]
Dtype = Literal["float32", "bfloat16"]
CacheFormat = Literal["f32", "bf16", "fp8", "int8", "fp4", "nuq4", "mixed"]
HotFormat = Literal["f32", "bf16", "fp8", "int8"]
ColdFormat = Literal["f32", "bf16", "fp8", "int8", "fp4", "nuq4", "none"]
SalienceRule = Literal["attention", "random"]
RopeFormat = Literal["bf16", "fp8"]
SCALED_FORMATS: tuple[CacheFormat, ...] = (
    "fp8",
    "int8",
    "fp4",
    "nuq4",
    "mixed",
)  # their rope key may be fp8, too
KV_FORMATS: tuple[CacheFormat, ...] = ("f32", "bf16")  # of keys and values, which have no norm to bound them
Remat = Literal["none", "full", "dots"]

_LARGEST, _LARGEST_FLOAT = 2**31 - 1, 3.4e38  # of int32 and float32


class ConfigError(ValueError):
    """A configuration value that cannot work; the message names the field, the value and the rule."""


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    """Raise `ConfigError` in the house's one form unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{field} = {value!r}: {allowed}")


def require_choice(field: str, value: Any, literal: Any) -> None:
    options = typing.get_args(literal)
    require(value in options, field, value, f"must be one of {', '.join(map(repr, options))}")


def require_cache_format(
    cache_format: str, rope_format: str, attention: "AttentionConfig | GQAConfig | None" = None
) -> None:
    """Raise `ConfigError` unless both are known, go together, and go with that attention if it is given."""
    require_choice("cache_format", cache_format, CacheFormat)
    require_choice("rope_format", rope_format, RopeFormat)
    allowed = f"goes with cache_format {', '.join(map(repr, SCALED_FORMATS))} only, not {cache_format!r}"
    require(rope_format == "bf16" or cache_format in SCALED_FORMATS, "rope_format", rope_format, allowed)
    if isinstance(attention, GQAConfig):
        allowed = (
            f"must be {' or '.join(map(repr, KV_FORMATS))} for keys and values (attention is a GQAConfig)"
        )
        require(cache_format in KV_FORMATS, "cache_format", cache_format, allowed)


def require_types(config: Any, prefix: str = "") -> None:
    """Check every field of a configuration against its annotation; numbers must be finite and fit an int32.

    Raises:
      ConfigError: naming the first field whose value is of another type.
    """
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        rule = _broken_rule(hint, value)
        if rule:
            raise ConfigError(f"{prefix}{name} = {value!r}: {rule}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _broken_rule(hint: Any, value: Any) -> str | None:
    """What `value` must be to fit the annotation `hint`, or None if it does."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        options = [o for o in options if o is not type(None)]
        if len(options) > 1:  # of dataclasses
            names = " or ".join(o.__name__ for o in options)
            return None if isinstance(value, tuple(options)) else f"must be of type {names}"
        return _broken_rule(options[0], value)
    if origin is Literal:
        return None  # `require_choice` lists the options
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, list | tuple):
            return "must be a tuple"
        return next((f"holds {v!r}, which {r}" for v in value if (r := _broken_rule(options[0], v))), None)
    if hint is bool or hint is str:
        return None if isinstance(value, hint) else f"must be {'true or false' if hint is bool else 'text'}"
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if number and isinstance(value, numbers.Integral) and abs(int(value)) > _LARGEST:
        return f"must not exceed {_LARGEST}"
    if hint is int:
        return None if number and isinstance(value, numbers.Integral) else "must be a whole number"
    if hint is float:
        return None if number and abs(float(value)) <= _LARGEST_FLOAT else "must be a finite number"
    return None if isinstance(value, hint) else f"must be of type {hint.__name__}"


def require_positive(config: Any, prefix: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{prefix}{name}", value, "must be greater than 0")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the dims that are rotated, scaled when `factor` is above 1.

    `interleaved` rotates the pairs (0, 1), (2, 3), ...; `half` rotates (i, i + r/2). YaRN follows
    Peng et al. 2023 (arXiv:2309.00071) in the DeepSeek form: the tables are multiplied by
    m(mscale) / m(mscale_all_dim) and the softmax scale by m(mscale_all_dim)^2, where
    m(s) = 0.1 s ln(factor) + 1. `llama3` is the scaling of Llama 3.1: the same kept and slowed pairs, in between
    linear in the turns rather than in the pair's number, and no temperature.

    Attributes:
      theta: base of the frequencies.
      convention: which dims form a pair, "interleaved" or "half".
      factor: the stretch of the original length; 1 for none.
      original_length: tokens of context before the stretch.
      beta_fast: pairs that turn more often than this within the original length keep their speed.
      beta_slow: pairs that turn less often than this are slowed by the whole factor.
      mscale: weight of YaRN's temperature on the rope dims.
      mscale_all_dim: weight of its temperature on all dims, by way of the softmax scale; 0 for none.
      scaling: how it is stretched, "yarn" or "llama3".
    """

    theta: float = 10_000.0
    convention: RopeConvention = "interleaved"
    factor: float = 1.0
    original_length: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    scaling: RopeScaling = "yarn"

    def __post_init__(self):
        p = "attention.rope."
        require_types(self, p)
        require_choice(p + "scaling", self.scaling, RopeScaling)
        require_choice(p + "convention", self.convention, RopeConvention)
        require(self.theta > 1, p + "theta", self.theta, "must be above 1")
        require_positive(self, p, "original_length", "beta_slow")
        require(self.factor >= 1, p + "factor", self.factor, "must be at least 1 (1 means no scaling)")
        require(
            self.beta_fast >= self.beta_slow,
            p + "beta_fast",
            self.beta_fast,
            f"must not be below beta_slow ({self.beta_slow})",
        )
        require(self.mscale >= 0, p + "mscale", self.mscale, "must be 0 or more")
        require(self.mscale_all_dim >= 0, p + "mscale_all_dim", self.mscale_all_dim, "must be 0 or more")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
      num_heads: query heads.
      q_lora_rank: width through which queries are projected; 0 projects them directly.
      kv_lora_rank: dims of the latent, what the cache keeps of each token.
      qk_nope_head_dim: dims of a head's query and key without position.
      qk_rope_head_dim: dims with rotary position; one such key for all heads, kept beside the latent.
      v_head_dim: dims of a head's value.
      rope: the rotary embedding.
      latent_norm_eps: epsilon of the norms of latent and q_lora.
    """

    num_heads: int = 16
    q_lora_rank: int = 0
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope: RopeConfig = RopeConfig()
    # Low-rank norms of the DeepSeek models use 1e-6 whatever the model's own epsilon is.
    latent_norm_eps: float = 1e-6

    def __post_init__(self):
        p = "attention."
        require_types(self, p)
        require_positive(
            self, p, "num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
            "latent_norm_eps",
        )  # fmt: skip
        require(self.q_lora_rank >= 0, p + "q_lora_rank", self.q_lora_rank, "must be 0 (none) or more")
        require(
            self.qk_rope_head_dim % 2 == 0,
            p + "qk_rope_head_dim",
            self.qk_rope_head_dim,
            "must be even: rope rotates pairs of dims",
        )

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_dim(self) -> int:
        """Dims of a head that are rotated."""
        return self.qk_rope_head_dim

    @property
    def cache_heads(self) -> int:
        """Entries that a layer's cache keeps of each token."""
        return 1

    @property
    def cache_dims(self) -> tuple[int, int]:
        """Dims of such an entry: the latent and the rope key."""
        return self.kv_lora_rank, self.qk_rope_head_dim


@dataclasses.dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention (arXiv:2305.13245): keys and values per KV head, all dims rotated.

    Attributes:
      num_heads: query heads.
      num_kv_heads: heads of keys and values, each of which serves as many query heads; `num_heads` of them make it
        multi-head attention.
      head_dim: dims of a head's query, key and value.
      rope: the rotary embedding.
      qkv_bias: add a bias to queries, keys and values.
      qk_norm: RMS-normalise queries and keys head by head before the rotation, each with a weight `[head_dim]`.
    """

    num_heads: int = 12
    num_kv_heads: int = 4
    head_dim: int = 64
    rope: RopeConfig = RopeConfig(convention="half")
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        p = "attention."
        require_types(self, p)
        require_positive(self, p, "num_heads", "num_kv_heads", "head_dim")
        require(
            self.num_heads % self.num_kv_heads == 0,
            p + "num_kv_heads",
            self.num_kv_heads,
            f"must divide num_heads ({self.num_heads})",
        )
        even = "must be even: rope rotates pairs of dims"
        require(self.head_dim % 2 == 0, p + "head_dim", self.head_dim, even)

    @property
    def qk_head_dim(self) -> int:
        return self.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.head_dim

    @property
    def rope_dim(self) -> int:
        """Dims of a head that are rotated."""
        return self.head_dim

    @property
    def cache_heads(self) -> int:
        """Entries that a layer's cache keeps of each token."""
        return self.num_kv_heads

    @property
    def cache_dims(self) -> tuple[int, int]:
        """Dims of such an entry: the head's value and its key."""
        return self.head_dim, self.head_dim


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts; `num_experts` 0 makes every layer a dense MLP.

    Experts are selected by score + bias and weighted by score. With `num_groups` above 1 only the
    experts of the `top_groups` best groups take part, a group being worth its best expert (`max`,
    DeepSeek-V2) or the sum of its best two (`top2`, DeepSeek-V3).

    Attributes:
      num_experts: routed experts; 0 makes every layer a dense MLP.
      num_shared_experts: experts that every token passes through.
      top_k: routed experts of each token.
      expert_size: hidden width of an expert.
      first_dense: layers at the bottom that keep a dense MLP.
      num_groups: groups of experts; 1 for none.
      top_groups: groups whose experts take part, for each token.
      group_score: what a group is worth, "max" or "top2".
      score: how router outputs become scores, "softmax", "sigmoid" or "sqrt_softplus".
      normalize: make the weights of a token's experts add up to 1.
      routed_scale: factor on these weights.
      bias_step: step of the auxiliary-loss-free balancing (arXiv:2408.15664); 0 for none.
      sequence_loss: weight of the sequence-wise balance loss; 0 for none.
      z_loss: weight of the router's z-loss; 0 for none.
    """

    num_experts: int = 0
    num_shared_experts: int = 0
    top_k: int = 1
    expert_size: int = 0
    first_dense: int = 0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "top2"
    score: RouterScore = "sigmoid"
    normalize: bool = True
    routed_scale: float = 1.0
    bias_step: float = 1e-3
    sequence_loss: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self):
        p = "moe."
        require_types(self, p)
        require_choice(p + "score", self.score, RouterScore)
        require_choice(p + "group_score", self.group_score, GroupScore)
        for name in (
            "num_experts",
            "num_shared_experts",
            "first_dense",
            "bias_step",
            "sequence_loss",
            "z_loss",
        ):
            value = getattr(self, name)
            require(value >= 0, p + name, value, "must be 0 or more")
        if self.num_experts == 0:
            return
        require_positive(self, p, "expert_size", "routed_scale")
        e, g = self.num_experts, self.num_groups
        require(1 <= self.top_k <= e, p + "top_k", self.top_k, f"must lie between 1 and num_experts ({e})")
        require(g >= 1 and e % g == 0, p + "num_groups", g, f"must divide num_experts ({e})")
        require(
            1 <= self.top_groups <= g,
            p + "top_groups",
            self.top_groups,
            f"must lie between 1 and num_groups ({g})",
        )
        require(
            self.top_k <= self.top_groups * (e // g),
            p + "top_k",
            self.top_k,
            f"must not exceed the experts of the selected groups ({self.top_groups} groups of {e // g})",
        )
        if g > 1 and self.group_score == "top2":
            require(
                e // g >= 2,
                p + "num_groups",
                g,
                f"groups of {e // g} expert cannot be scored by their best two",
            )


@dataclasses.dataclass(frozen=True)
class MixedConfig:
    """The mixed cache: every token in a 4-bit format, and 8-bit copies of those that matter most.

    A sequence is divided into pages of `page` tokens. A query reads 8-bit copies of its own page, of the
    `window` tokens before that page, of the first `sinks` tokens and of up to `salient` more; all other tokens
    it reads in 4 bits. Sinks and salient tokens change only where a page begins, see `mlaflax.salience`.

    Attributes:
      hot: 8-bit format of the window, the sinks and the salient tokens.
      cold: 4-bit format of the rest; "none" deletes it, which only the training graph can, to tell what it is worth.
      page: tokens in a page; of the cache's pages, too.
      window: tokens before a query's own page that it reads in 8 bits; a multiple of `page`.
      sinks: tokens at the beginning of a sequence that stay in 8 bits.
      salient: most tokens, beside sinks and window, that stay in 8 bits for the attention they get. None by default:
        they changed no perplexity that could be measured (docs/design.md).
      choose: what makes a token salient: "attention", or "random" as a control.
      probe_stride: queries at multiples of this position measure attention; must divide `page`.
    """

    hot: HotFormat = "int8"
    cold: ColdFormat = "nuq4"
    page: int = 128
    window: int = 128
    sinks: int = 4
    salient: int = 0
    choose: SalienceRule = "attention"
    probe_stride: int = 8

    def __post_init__(self):
        p = "mixed."
        require_types(self, p)
        require_choice(p + "hot", self.hot, HotFormat)
        require_choice(p + "cold", self.cold, ColdFormat)
        require_choice(p + "choose", self.choose, SalienceRule)
        require_positive(self, p, "page", "probe_stride")
        for name in ("window", "sinks", "salient"):
            value = getattr(self, name)
            require(value >= 0, p + name, value, "must be 0 or more")
        require(
            self.window % self.page == 0,
            p + "window",
            self.window,
            f"must be a multiple of mixed.page ({self.page})",
        )
        require(
            self.page % self.probe_stride == 0,
            p + "probe_stride",
            self.probe_stride,
            f"must divide mixed.page ({self.page})",
        )

    @property
    def ring(self) -> int:
        """Pages of the window, the query's own among them."""
        return self.window // self.page + 1

    @property
    def kept(self) -> int:
        """Tokens outside the window that stay in 8 bits, at most."""
        return self.sinks + self.salient

    @property
    def kept_pages(self) -> int:
        """Pages that hold them."""
        return -(-self.kept // self.page)

    @property
    def measured(self) -> int:
        """Tokens whose attention is measured: those of the ring, which may become salient, and the salient ones."""
        return self.ring * self.page + self.salient if self.salient else 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of `num_layers` pre-norm layers: attention, then a SwiGLU MLP or a mixture of experts.

    Attributes:
      vocab_size: entries of the vocabulary.
      num_layers: layers, dense ones included.
      hidden_size: width of the residual stream.
      attention: latent attention, or grouped-query attention with a cache of keys and values.
      moe: mixture of experts.
      norm_eps: epsilon of the layers' norms.
      tie_embeddings: use the embedding as head.
      init_std: standard deviation of the first weights.
      max_length: longest sequence, in tokens, that training or serving may use.
      mlp_size: hidden width of the dense MLPs.
      dtype: of activations and matrix products; weights are float32, as are router and softmax.
      cache_format: the cache's number format that the training graph simulates (`f32`: no rounding).
      mixed: tiers of the `mixed` cache format.
      rope_format: how it keeps the rope key of formats that scale: `bf16`, or `fp8` with a scale per token.
      remat: what the backward pass recomputes per layer: `none`, `dots` (keeps matrix products), `full`.
    """

    vocab_size: int = 32_000
    num_layers: int = 12
    hidden_size: int = 768
    mlp_size: int = 2048
    max_length: int = 4096
    attention: AttentionConfig | GQAConfig = AttentionConfig()
    moe: MoEConfig = MoEConfig()
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    init_std: float = 0.02
    dtype: Dtype = "float32"
    cache_format: CacheFormat = "f32"
    mixed: MixedConfig = MixedConfig()
    rope_format: RopeFormat = "bf16"
    remat: Remat = "none"

    def __post_init__(self):
        require_types(self)
        require_positive(
            self, "", "vocab_size", "num_layers", "hidden_size", "max_length", "norm_eps", "init_std"
        )
        require_choice("dtype", self.dtype, Dtype)
        require_cache_format(self.cache_format, self.rope_format, self.attention)
        require_choice("remat", self.remat, Remat)
        for name in ("window", "kept"):
            tokens = getattr(self.mixed, name)
            require(
                self.cache_format != "mixed" or tokens < self.max_length,
                "mixed.window" if name == "window" else "mixed.sinks + mixed.salient",
                tokens,
                f"must be below max_length ({self.max_length})",
            )
        if self.num_dense_layers:
            require_positive(self, "", "mlp_size")
        require(
            self.moe.first_dense <= self.num_layers,
            "moe.first_dense",
            self.moe.first_dense,
            f"must not exceed num_layers ({self.num_layers})",
        )

    @property
    def latent_attention(self) -> AttentionConfig:
        """`attention`, where only latent attention will do.

        Raises:
          ConfigError: it is grouped-query attention.
        """
        needed = "must be an AttentionConfig here: this needs a latent, and there are keys and values"
        require(isinstance(self.attention, AttentionConfig), "attention", self.attention, needed)
        return typing.cast(AttentionConfig, self.attention)

    @property
    def uses_codebook(self) -> bool:
        """Whether the training graph rounds to the levels of a codebook."""
        return (self.mixed.cold if self.cache_format == "mixed" else self.cache_format) == "nuq4"

    @property
    def num_dense_layers(self) -> int:
        return self.moe.first_dense if self.moe.num_experts else self.num_layers

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as plain JSON-ready values."""
    return dataclasses.asdict(config)


def from_dict(cls: type[T], values: dict[str, Any], prefix: str = "") -> T:
    """Rebuild a configuration of type `cls` from `to_dict`'s output.

    Raises:
      ConfigError: on an unknown field (with the nearest known name) or a value that `cls` refuses.
    """
    if not isinstance(values, dict):
        raise ConfigError(
            f"{prefix.removesuffix('.') or cls.__name__} = {values!r}: must hold the fields of {cls.__name__}"
        )
    hints = typing.get_type_hints(cls)
    kwargs = {}
    for name, value in values.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = (
                f"; did you mean {prefix}{near[0]}?" if near else f"; {cls.__name__} has {', '.join(hints)}"
            )
            raise ConfigError(f"{prefix}{name} is not a field of {cls.__name__}{hint}")
        kwargs[name] = _rebuild(hints[name], value, f"{prefix}{name}")
    return cls(**kwargs)


def _rebuild(hint: Any, value: Any, name: str) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        hint = _meant([o for o in options if o is not type(None)], value)
    if dataclasses.is_dataclass(hint):
        # What is no dict is refused there.
        return from_dict(typing.cast(type, hint), typing.cast(dict, value), f"{name}.")
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple(value)
    return value


def _meant(options: list[Any], value: Any) -> Any:
    """Which of the types a JSON value is of: the dataclass that knows most of its fields, the first of equals."""
    if len(options) == 1 or not isinstance(value, dict):
        return options[0]
    return max(options, key=lambda o: len({f.name for f in dataclasses.fields(o)} & set(value)))
