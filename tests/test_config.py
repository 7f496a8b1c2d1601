"""Configurations: what cannot work is refused on construction, and what JSON carries comes back."""

import dataclasses
import json
import math

import numpy as np
import pytest

from mlaflax.config import (
    AttentionConfig,
    ConfigError,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    from_dict,
    to_dict,
)

CONFIG = ModelConfig(
    num_layers=3,
    attention=AttentionConfig(rope=RopeConfig(factor=40.0)),
    moe=MoEConfig(num_experts=8, top_k=2, expert_size=32, num_groups=4, top_groups=2),
)


def test_json_carries_a_configuration():
    assert from_dict(ModelConfig, json.loads(json.dumps(to_dict(CONFIG)))) == CONFIG


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("num_layers", 2.0, "num_layers = 2.0: must be a whole number"),
        ("num_layers", "2", "num_layers = '2': must be a whole number"),
        ("num_layers", True, "num_layers = True: must be a whole number"),
        ("hidden_size", 10**20, f"hidden_size = {10**20}: must not exceed 2147483647"),
        ("init_std", math.inf, "init_std = inf: must be a finite number"),
        ("norm_eps", math.nan, "norm_eps = nan: must be a finite number"),
        ("tie_embeddings", 1, "tie_embeddings = 1: must be true or false"),
        ("attention", None, "attention = None: must hold the fields of AttentionConfig"),
        ("attention.num_heads", 0, "attention.num_heads = 0: must be greater than 0"),
        ("attention.qk_rope_head_dim", 7, "attention.qk_rope_head_dim = 7: must be even"),
        ("attention.rope.theta", 1, "attention.rope.theta = 1: must be above 1"),
        ("attention.rope.factor", math.inf, "attention.rope.factor = inf: must be a finite number"),
        ("moe.routed_scale", math.inf, "moe.routed_scale = inf: must be a finite number"),
        ("moe.top_k", 9, "moe.top_k = 9: must lie between 1 and num_experts"),
        ("moe.num_groups", 3, "moe.num_groups = 3: must divide num_experts"),
        ("moe.top_kk", 3, "moe.top_kk is not a field of MoEConfig; did you mean moe.top_k?"),
    ],
)
def test_what_a_file_may_not_say(path, value, message):
    values = to_dict(CONFIG)
    *groups, name = path.split(".")
    inside = values
    for group in groups:
        inside = inside[group]
    inside[name] = value
    with pytest.raises(ConfigError) as error:
        from_dict(ModelConfig, values)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("values", [None, "x", [1]])
def test_what_is_no_configuration(values):
    with pytest.raises(ConfigError, match="must hold the fields of ModelConfig"):
        from_dict(ModelConfig, values)


def test_numbers_of_numpy_are_numbers_and_parts_are_typed():
    assert dataclasses.replace(CONFIG, num_layers=np.int64(3), init_std=np.float32(0.5)).num_layers == 3
    with pytest.raises(ConfigError, match="attention = None: must be of type AttentionConfig"):
        dataclasses.replace(CONFIG, attention=None)
