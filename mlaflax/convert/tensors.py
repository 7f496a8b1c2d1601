"""The tensors of a model's Hugging Face files, one by one, of whichever family it is.

Import, export and the checks of names read the families' own tables of rules.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mlaflax.config import AttentionConfig, ConfigError, ModelConfig
from mlaflax.convert import deepseek, llama
from mlaflax.convert.layout import Piece, Rule, check_shapes, top_rules

FAMILIES = (deepseek, llama)


class HFTensor(NamedTuple):
    """A tensor of the files: float32 of `shape`, made when `read` is called."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes; its `architectures` choose the family.

    Raises:
      ConfigError: an architecture, a key or a value that is not supported.
    """
    named = [*(config.get("architectures") or ())] or [config.get("model_type")]
    for family in FAMILIES:
        if any(name in family.ARCHITECTURES or name in family.ARCHITECTURES.values() for name in named):
            return family.model_config_from_hf(config)
    known = ", ".join(name for family in FAMILIES for name in family.ARCHITECTURES)
    raise ConfigError(
        f"architectures = {config.get('architectures')!r}, model_type = {config.get('model_type')!r}: "
        f"must be one of {known}"
    )


def family_of(config: ModelConfig) -> Any:
    """The module of the family that a model belongs to: latent attention is DeepSeek's."""
    return deepseek if isinstance(config.attention, AttentionConfig) else llama


def pieces(config: ModelConfig) -> dict[str, list[Piece]]:
    """Each of our parameters, by its flat name, with the tensors that fill it, in the order of its leading axes.

    DeepSeek-V2 has no tensors for `moe_layers.moe.bias`: its list is empty, its values are 0.
    """
    found: dict[str, list[Piece]] = {}

    def add(name: str, rule: Rule, their_name: str, index: tuple[int, ...]) -> None:
        piece = rule.piece(their_name, index)
        if not name.endswith("attn.kv_up"):
            found.setdefault(name, []).append(piece)
            return
        nope, both = config.latent_attention.qk_nope_head_dim, rule.shape[1]
        for half, part in (("k_up", (0, nope)), ("v_up", (nope, both))):
            found.setdefault(name.replace("kv_up", half), []).append(piece._replace(part=part))

    for rule in top_rules(config):
        add(rule.ours, rule, rule.theirs, ())
    for stack, layers, rules in family_of(config).stacks(config):
        for rule in rules:
            for row, layer in enumerate(layers):
                for expert, name in enumerate(rule.names(layer)):
                    add(f"{stack}.{rule.ours}", rule, name, (row, expert) if rule.experts else (row,))
    if config.num_moe_layers:
        found.setdefault("moe_layers.moe.bias", [])
    return found


def tensors_to_hf(flat: Mapping[str, Any], config: ModelConfig) -> list[HFTensor]:
    """The tensors of the files, layer by layer; each is made when it is read.

    Args:
      flat: our parameters (arrays of jax or numpy, `moe_layers.moe.bias` included) by flat name.

    Raises:
      ConfigError: if no family can express the model, or on a missing, unknown or misshapen parameter.
    """
    family = family_of(config)
    family.require_expressible(config)
    check_shapes(flat, family.shapes(config))
    if family is deepseek:
        deepseek.require_no_bias_in_v2(flat, config)
    return list(_tensors(flat, config))


def _tensors(flat: Mapping[str, Any], config: ModelConfig) -> Iterator[HFTensor]:
    def tensor(rule: Rule, name: str, ours: str, index: tuple[int, ...]) -> HFTensor:
        def read() -> np.ndarray:
            if ours.endswith("attn.kv_up"):
                halves = (flat[ours.replace("kv_up", half)][index] for half in ("k_up", "v_up"))
                return rule.fold(np.concatenate([np.asarray(half) for half in halves], axis=1))
            return rule.fold(np.asarray(flat[ours][index] if index else flat[ours]))

        return HFTensor(name, rule.their_shape, read)

    for rule in top_rules(config):
        yield tensor(rule, rule.theirs, rule.ours, ())
    for stack, layers, rules in family_of(config).stacks(config):
        for row, layer in enumerate(layers):
            for rule in rules:
                for expert, name in enumerate(rule.names(layer)):
                    index = (row, expert) if rule.experts else (row,)
                    yield tensor(rule, name, f"{stack}.{rule.ours}", index)
    if family_of(config) is deepseek:
        for name, shape in deepseek.empty_tensors(config).items():
            yield HFTensor(name, shape, lambda shape=shape: np.zeros(shape, np.float32))
