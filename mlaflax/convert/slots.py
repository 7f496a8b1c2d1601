"""Where each tensor of a Hugging Face folder lies in the parameters here, tensor by tensor.

A parameter here is a stack over layers, and over experts in them. A slot is one tensor's place in one of them. Slots
are made of the families' rules, so import, export and the checks of names read the same tables.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mlaflax.config import AttentionConfig, ConfigError, ModelConfig
from mlaflax.convert import deepseek, llama
from mlaflax.convert.hf_folder import names_in_brief
from mlaflax.convert.layout import Rule, top_rules


class Slot(NamedTuple):
    """One tensor's place.

    Attributes:
      theirs: its name and `rule.their_shape` its shape in the files.
      ours: the parameter it belongs to, names joined by dots.
      index: layer and expert in the parameter's leading axes, as many as it has of them.
      rule: how the layouts go together.
      part: which of its second axis, unfolded, is in this place; None for all.
    """

    theirs: str
    ours: str
    index: tuple[int, ...]
    rule: Rule
    part: slice | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what lies here."""
        if self.part is None:
            return self.rule.shape
        first, second, *rest = self.rule.shape
        return (first, len(range(*self.part.indices(second))), *rest)

    @property
    def axis(self) -> int:
        """Our axis that goes with the first of the file's."""
        if not self.rule.transposed:
            return 0
        outputs, axis = 1, len(self.rule.shape)
        while outputs < self.rule.their_shape[0]:
            axis -= 1
            outputs *= self.rule.shape[axis]
        return axis

    @property
    def rows(self) -> int:
        """Rows of the file's tensor to one entry of `axis`."""
        return max(1, self.rule.their_shape[0] // max(1, self.rule.shape[self.axis]))

    def unfold(self, rows: np.ndarray) -> np.ndarray:
        """Whole entries of `axis`, given as rows of the file's tensor, in our layout."""
        shape = list(self.rule.shape)
        shape[self.axis] = len(rows) // self.rows
        value = (rows.T if self.rule.transposed else rows).reshape(shape)
        return value if self.part is None else value[:, self.part]


def stacks(config: ModelConfig) -> Iterator[tuple[str, range, list[Rule]]]:
    """Name, layer numbers and rules of each stack of layers, of whichever family the model is."""
    family = deepseek if isinstance(config.attention, AttentionConfig) else llama
    yield from family.stacks(config)


def slots(config: ModelConfig) -> list[Slot]:
    """The place of every tensor of the model's folder."""
    found = [Slot(rule.theirs, rule.ours, (), rule) for rule in top_rules(config)]
    for stack, layers, rules in stacks(config):
        for rule in rules:
            for row, layer in enumerate(layers):
                for expert, name in enumerate(rule.names(layer)):
                    index = (row, expert) if rule.experts else (row,)
                    if rule.ours == "attn.kv_up":  # one matrix there, two here
                        nope = config.latent_attention.qk_nope_head_dim
                        for part, which in ((slice(None, nope), "k_up"), (slice(nope, None), "v_up")):
                            found.append(Slot(name, f"{stack}.attn.{which}", index, rule, part))
                    else:
                        found.append(Slot(name, f"{stack}.{rule.ours}", index, rule))
    return found


def theirs_of(places: Iterable[Slot], params: Mapping[str, Any]) -> np.ndarray:
    """A tensor of the files, float32, from all of its places in `params`, arrays by our names joined by dots."""
    places = list(places)
    values = [np.asarray(params[place.ours][place.index], np.float32) for place in places]
    value = values[0] if len(values) == 1 else np.concatenate(values, axis=1)
    return places[0].rule.fold(value)


_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def compare_names(
    shapes: Mapping[str, tuple[int, ...]], places: Iterable[Slot], config: ModelConfig
) -> list[str]:
    """Hold the tensors of a folder against those of the model; returns the names that are left out on purpose.

    Those are prediction modules (`model.layers.N`, N at or above `num_layers`), rope buffers, and a head that repeats
    a tied embedding.

    Raises:
      ConfigError: tensors that are missing, unknown or of another shape, by name.
    """
    wanted = {place.theirs: place.rule.their_shape for place in places}
    predictors = {
        int(m[1]) for n in shapes if (m := _LAYER.match(n)) and n.endswith(".eh_proj.weight")
    } - set(range(config.num_layers))
    left_out = [
        name
        for name in shapes
        if name not in wanted
        and (
            ((m := _LAYER.match(name)) is not None and int(m[1]) in predictors)
            or name.endswith(".rotary_emb.inv_freq")
            or (name == "lm_head.weight" and config.tie_embeddings)
            or 0 in shapes[name]
        )
    ]
    missing = set(wanted) - set(shapes)
    unknown = set(shapes) - set(wanted) - set(left_out)
    if missing:
        raise ConfigError(f"the weights lack {len(missing)} tensors: {names_in_brief(missing)}")
    if unknown:
        raise ConfigError(
            f"the weights hold {len(unknown)} tensors that the configuration does not know: {names_in_brief(unknown)}"
        )
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise ConfigError(f"{name} has shape {shapes[name]}: the configuration says {shape}")
    return sorted(name for name in left_out if name != "lm_head.weight" and 0 not in shapes[name])
