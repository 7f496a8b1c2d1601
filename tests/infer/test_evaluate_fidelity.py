"""Errors of single layers and tiers, against NumPy and against what must be nothing; decoding speed."""

import dataclasses

import numpy as np
import pytest

from infer.evaluation import fidelity, speed
from infer.evaluation.text import Rows
from infer.evaluation.variants import parse_variants
from mlaflax.config import AttentionConfig, MixedConfig, ModelConfig, MoEConfig
from mlaflax.formats import get_format
from mlaflax.model import init_model

MIXED = MixedConfig(page=8, window=8, sinks=2, salient=6, probe_stride=4)
CONFIG = ModelConfig(
    vocab_size=96, num_layers=2, hidden_size=32, mlp_size=48, max_length=128, init_std=0.2, mixed=MIXED,
    attention=AttentionConfig(
        num_heads=2, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
    ),
    moe=MoEConfig(num_experts=4, num_shared_experts=1, top_k=2, expert_size=16, first_dense=1),
)  # fmt: skip
ROWS = Rows(np.random.default_rng(0).integers(0, 96, (2, 96), np.int32), np.array([0, 1]))


@pytest.fixture(scope="module")
def model():
    return init_model(CONFIG, seed=1)


@pytest.fixture(scope="module")
def measured(model):
    spelled = ["f32", "fp4", "mixed", "mixed:hot=f32", "mixed:cold=f32", "mixed:cold=none"]
    variants = parse_variants(spelled, CONFIG)
    told = []
    result = fidelity.measure(model, variants, ROWS, told.append)
    assert len(told) == fidelity.steps(model, ROWS) == 2 * 2
    return result


def test_errors_of_latents_are_those_of_numpy(model, measured):
    layer = fidelity._layers(model.unstacked())[0]
    error, square = 0.0, 0.0
    for row in ROWS.tokens:
        tokens = fidelity._tokens(model, len(row))
        latent, rope = layer.attn.entry(layer.attn_norm(model.embed[...][row][None]), tokens)
        rounded = np.asarray(get_format("fp4").simulate(latent, rope)[0])
        error += np.sum(np.square(rounded - np.asarray(latent), dtype=np.float64))
        square += np.sum(np.square(np.asarray(latent), dtype=np.float64))
    assert measured["layers"][0]["latent"]["fp4"]["latent"] == pytest.approx(error / square, rel=1e-4)
    assert set(measured["layers"][0]["latent"]) == {"bf16", "fp8", "int8", "fp4", "nuq4"}


def test_a_tier_that_is_exact_has_no_error_and_one_alone_has_all(measured):
    for layer in measured["layers"]:
        assert layer["attention"]["f32"] == 0
        only_cold, only_hot = layer["tiers"]["mixed:hot=f32"], layer["tiers"]["mixed:cold=f32"]
        # float32 sums in another order, no more; the rope key of exact tiers is exact, too
        assert max(only_cold["window"], only_cold["kept"], only_hot["cold"]) < 1e-10
        assert only_cold["cold"] == pytest.approx(layer["attention"]["mixed:hot=f32"], rel=1e-3)
        assert min(only_hot["window"], only_hot["kept"]) > 0
        assert layer["tiers"]["mixed:cold=none"]["cold"] == 0  # nothing there to round
        assert layer["attention"]["mixed:cold=none"] > layer["attention"]["mixed"]
        assert layer["attention"]["mixed"] < layer["attention"]["fp4"]


def test_attention_is_shared_out(measured):
    assert measured["queries_from"] == 64
    for layer in measured["layers"]:
        shares = layer["mass"]["mixed"]
        assert set(shares) == {"window", "sinks", "salient", "cold"} and min(shares.values()) > 0
        assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
        # Near uniform weights: each tier gets about its share of the tokens.
        assert shares["cold"] > shares["window"] > shares["sinks"]


def test_speed_is_measured_in_turns(model, monkeypatch):
    monkeypatch.setattr(speed, "ROUNDS", 2)
    monkeypatch.setattr(speed, "TOKENS", 3)
    variants = parse_variants(["f32", "mixed"], dataclasses.replace(CONFIG))
    told = []
    result = speed.measure(model, variants, 64, told.append)
    assert told == ["bf16", "f32", "mixed"] * 3 and speed.steps(variants) == 9
    assert result["variants"]["bf16"]["of_bf16"] == result["variants"]["f32"]["of_f32"] == 1
    assert all(v["tokens_per_second"] > 0 for v in result["variants"].values())
