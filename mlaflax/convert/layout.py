"""Names and layouts of Hugging Face weights and configurations, as far as families share them.

The released files hold one matrix `[out, in]` per projection and per expert. Ours (docs/design.md) are stacked over
layers and experts, `[in, out]`, with the heads unfolded. A family is a table of `Rule`s and a reading of config.json.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from mlaflax.config import ConfigError, ModelConfig, RopeConfig, require
from mlaflax.model.mla import Codebook

Params = dict[str, Any]

# Configuration

_ROPE_INERT = frozenset({"type", "rope_type", "rope_theta"})


class Keys:
    """Reads a dict key by key and knows what is left; None counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = {k: v for k, v in values.items() if v is not None}
        self.where = where
        self.seen: set[str] = set()

    def __call__(self, name: str, *default: Any) -> Any:
        self.seen.add(name)
        if name in self.values:
            return self.values[name]
        if default:
            return default[0]
        raise ConfigError(f"{self.where} lacks {name!r}")

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse any value but those that the model here computes; the first is what absence means."""
        value = self(name, allowed[0])
        require(
            value in allowed,
            name,
            value,
            f"must be {' or '.join(map(repr, allowed))}: nothing else is supported",
        )

    def close(self, inert: frozenset[str]) -> None:
        unknown = sorted(set(self.values) - self.seen - inert)
        if unknown:
            raise ConfigError(
                f"{self.where} has unknown keys, which might change the numbers: {', '.join(unknown)}"
            )


def _temperature(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def rope_from_hf(key: Keys, convention: Any, kinds: tuple[str, ...] = ("default", "yarn")) -> RopeConfig:
    """The rotary embedding that a config.json describes, as `rope_parameters` or `rope_theta` and `rope_scaling`.

    Raises:
      ConfigError: a kind that is not among `kinds`, or a value not supported here.
    """
    old, new = key("rope_scaling", None), key("rope_parameters", None)
    rope = Keys(new or old or {}, "rope_parameters" if new else "rope_scaling")
    theta = float(key("rope_theta", rope("rope_theta", 10_000.0)))
    kind = rope("rope_type", rope("type", "default"))
    rope.only("partial_rotary_factor", 1.0)
    key.only("partial_rotary_factor", 1.0)
    require(kind in kinds, "rope_type", kind, f"must be {' or '.join(map(repr, kinds))}")
    if kind == "default":
        rope.close(_ROPE_INERT)
        return RopeConfig(theta=theta, convention=convention)
    if kind == "llama3":
        found = RopeConfig(
            theta=theta,
            convention=convention,
            factor=float(rope("factor")),
            original_length=rope("original_max_position_embeddings"),
            beta_fast=float(rope("high_freq_factor")),
            beta_slow=float(rope("low_freq_factor")),
            scaling="llama3",
        )
        rope.close(_ROPE_INERT)
        return found
    rope.only("truncate", True)
    factor = float(rope("factor"))
    mscale, all_dim = rope("mscale", 0), float(rope("mscale_all_dim", 0))
    table_factor = rope("attention_factor", None)
    original = rope("original_max_position_embeddings", key("max_position_embeddings"))
    fast, slow = rope("beta_fast", None) or 32.0, rope("beta_slow", None) or 1.0
    rope.close(_ROPE_INERT)
    require(factor >= 1, "rope factor", factor, "must be at least 1")
    # Ours multiplies the tables by m(mscale) / m(mscale_all_dim). transformers does so only when both are
    # set, and otherwise by attention_factor or m(1): the mscale that says the same is solved for.
    if factor == 1 or (table_factor is None and mscale and all_dim):
        mscale = float(mscale or 1.0)
        same = table_factor is None or factor > 1 or table_factor == 1
        require(same, "attention_factor", table_factor, "must be 1 where the rope factor is 1")
    elif table_factor is None and not all_dim:
        mscale = 1.0
    else:
        wanted = _temperature(factor, 1) if table_factor is None else table_factor
        solved = (wanted * _temperature(factor, all_dim) - 1) / (0.1 * math.log(factor))
        mscale = float(mscale) if math.isclose(solved, mscale, abs_tol=1e-9) else solved
    return RopeConfig(
        theta=theta,
        convention=convention,
        factor=factor,
        original_length=original,
        beta_fast=float(fast),
        beta_slow=float(slow),
        mscale=mscale,
        mscale_all_dim=all_dim,
    )


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The inverse of `rope_from_hf`, as `rope_parameters`."""
    if rope.factor == 1:
        return {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling == "llama3":
        return {
            "rope_type": "llama3",
            "rope_theta": rope.theta,
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_length,
            "low_freq_factor": rope.beta_slow,
            "high_freq_factor": rope.beta_fast,
        }
    values: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_length,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }
    if not (rope.mscale and rope.mscale_all_dim):
        # transformers derives the tables' factor from these two only where neither is 0.
        tables, scores = (_temperature(rope.factor, x) for x in (rope.mscale, rope.mscale_all_dim))
        values["attention_factor"] = tables / scores
    return values


# Parameters


def load_params(model: nnx.Module, params: Mapping[str, Any]) -> None:
    """Replace every weight of `model`, a stacked `Transformer`, by `params`, in place.

    Each array takes the dtype and the sharding of the one it replaces. The model may be abstract
    (`nnx.eval_shape`): its weights then never existed before.

    Args:
      params: nested dict as `params_from_hf` returns it.

    Raises:
      ConfigError: on a missing, unknown or misshapen parameter; the model is then unchanged.
    """
    variables = {
        ".".join(map(str, path)): variable
        for path, variable in nnx.to_flat_state(nnx.state(model))
        if not isinstance(variable, nnx.RngState | Codebook)  # what no such file holds
    }
    old = {name: variable.get_value() for name, variable in variables.items()}
    values = check_shapes(flatten(params), {name: tuple(value.shape) for name, value in old.items()})
    new = {k: jax.device_put(v.astype(old[k].dtype), old[k].sharding) for k, v in values.items()}
    nnx.update(model, nest(new))


# Names and layouts


class Rule(NamedTuple):
    """One parameter: its name and shape here, and its name and shape in the files.

    `transposed` says that ours has its input axes first, where theirs has them last. `experts` above 0 makes
    `theirs` a pattern with one tensor per expert, stacked in ours.
    """

    ours: str
    theirs: str
    shape: tuple[int, ...]
    their_shape: tuple[int, ...]
    transposed: bool = False
    experts: int = 0

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        return (self.experts, *self.shape) if self.experts else self.shape

    def names(self, layer: int) -> Iterator[str]:
        """Their names of this parameter's tensors in one layer, expert by expert."""
        for e in range(max(self.experts, 1)):
            yield f"model.layers.{layer}.{self.theirs.format(e=e)}"

    def piece(self, name: str, index: tuple[int, ...]) -> "Piece":
        """Where tensor `name` lies: at `index` of the leading axes of ours."""
        if not self.transposed:
            matrix = len(self.their_shape) == 2
            rows, columns = (self.shape[:-1], self.shape[-1:]) if matrix else (self.shape, ())
            return Piece(name, self.their_shape, index, rows, columns, False)
        # Ours is [*inputs, *outputs]: the inputs are the leading axes that make up their columns.
        cut = next(i for i in range(len(self.shape) + 1) if math.prod(self.shape[:i]) == self.their_shape[1])
        return Piece(name, self.their_shape, index, self.shape[cut:], self.shape[:cut], True)

    def unfold(self, theirs: np.ndarray) -> np.ndarray:
        return (theirs.T if self.transposed else theirs).reshape(self.shape)

    def fold(self, ours: np.ndarray) -> np.ndarray:
        if self.transposed:
            ours = ours.reshape(self.their_shape[::-1]).T
        return np.ascontiguousarray(ours.reshape(self.their_shape), np.float32)


class Piece(NamedTuple):
    """One tensor of the files as a block of one of our parameters.

    Theirs is a matrix `[prod(rows), prod(columns)]`, or a vector `[prod(rows)]` where `columns` is empty. Ours at
    `index` is `[*columns, *rows]` if `transposed`, else `[*rows, *columns]`, with only `part` (start, stop) of
    the second axis of `rows` where that is given: two of our parameters share such a tensor.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    transposed: bool
    part: tuple[int, int] | None = None


def same(ours: str, theirs: str, *shape: int) -> Rule:
    """A parameter that has the same shape on both sides."""
    return Rule(ours, theirs, shape, shape)


def linear(
    ours: str, theirs: str, inputs: tuple[int, ...], outputs: tuple[int, ...], experts: int = 0
) -> Rule:
    """A projection: `[*inputs, *outputs]` here, `[outputs, inputs]` with both folded there."""
    their_shape = (math.prod(outputs), math.prod(inputs))
    return Rule(ours, theirs, (*inputs, *outputs), their_shape, True, experts)


def top_rules(config: ModelConfig) -> list[Rule]:
    """What is outside the layers: embedding, last norm, and the head where it is not the embedding."""
    w, d = config.vocab_size, config.hidden_size
    rules = [
        same("embed", "model.embed_tokens.weight", w, d),
        same("final_norm.scale", "model.norm.weight", d),
    ]
    return rules if config.tie_embeddings else [*rules, linear("head", "lm_head.weight", (d,), (w,))]


def mlp_rules(ours: str, theirs: str, d: int, width: int, experts: int = 0) -> list[Rule]:
    """A SwiGLU of `width` in a model of width `d`, or, with `experts` above 0, that many of them in one stack."""
    return [
        linear(f"{ours}.gate", f"{theirs}.gate_proj.weight", (d,), (width,), experts),
        linear(f"{ours}.up", f"{theirs}.up_proj.weight", (d,), (width,), experts),
        linear(f"{ours}.down", f"{theirs}.down_proj.weight", (width,), (d,), experts),
    ]


class Reader:
    """Takes tensors out of a state dict as float32 and knows what is left."""

    def __init__(self, state_dict: Mapping[str, np.ndarray]):
        self.tensors = state_dict
        self.left = set(state_dict)

    def read(self, rule: Rule, name: str) -> np.ndarray:
        if name not in self.tensors:
            raise ConfigError(f"the weights lack {name}, shape {rule.their_shape}")
        return rule.unfold(self._take(name, rule.their_shape))

    def read_layer(self, rule: Rule, layer: int) -> np.ndarray:
        parts = [self.read(rule, name) for name in rule.names(layer)]
        return np.stack(parts) if rule.experts else parts[0]

    def drop_tied(self, name: str, embed: np.ndarray) -> None:
        """Some files repeat a tied head; one that differs would be lost silently."""
        if name in self.left and not np.array_equal(self._take(name, embed.shape), embed):
            raise ConfigError(f"{name} differs from the embedding, but tie_word_embeddings is true")

    def close(self, num_layers: int) -> None:
        ignored = left_out_of(self.left, num_layers)
        unknown = sorted(name for name in self.left if name not in ignored and np.size(self.tensors[name]))
        if unknown:
            raise ConfigError(
                first_names("the weights hold tensors that the configuration does not know", unknown)
            )

    def _take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        value = np.asarray(self.tensors[name])
        self.left.discard(name)
        if str(value.dtype) not in ("float32", "float64", "bfloat16", "float16"):
            raise ConfigError(f"{name} is {value.dtype}: must be float32, float64, bfloat16 or float16")
        if value.shape != shape:
            raise ConfigError(f"{name} has shape {value.shape}: the configuration says {shape}")
        return value.astype(np.float32)


def left_out_of(names: Iterable[str], num_layers: int) -> dict[str, str]:
    """Those of the files' `names` that no layer here reads, each with the reason in two or three words.

    Layers at or above `num_layers` are prediction modules where one of their tensors is `eh_proj`, which tells
    them from layers that the configuration forgot.
    """
    names = list(names)
    layer_of = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in names}
    predictors = {int(m[1]) for n, m in layer_of.items() if m and ".eh_proj." in n}
    found = {}
    for name, m in layer_of.items():
        if m and int(m[1]) >= num_layers and int(m[1]) in predictors:
            found[name] = "prediction module"
        elif name.endswith(".rotary_emb.inv_freq"):
            found[name] = "rope buffer"
    return found


def first_names(what: str, names: list[str]) -> str:
    """A sentence with the first three of the names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}: {', '.join(names[:3])}{more}"


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, names joined by dots."""
    flat = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def nest(flat: Mapping[str, Any]) -> Params:
    """The inverse of `flatten`."""
    nested: Params = {}
    for name, value in flat.items():
        *path, leaf = name.split(".")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return nested


def check_shapes(flat: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any]:
    """`flat`, if its names and shapes are exactly `shapes`."""
    if missing := sorted(set(shapes) - set(flat)):
        raise ConfigError(first_names("parameters are missing", missing))
    if extra := sorted(set(flat) - set(shapes)):
        raise ConfigError(first_names("parameters are unknown to the model", extra))
    for name, value in flat.items():
        if value.shape != shapes[name]:
            raise ConfigError(f"parameter {name} has shape {value.shape}: the model's is {shapes[name]}")
    return flat
