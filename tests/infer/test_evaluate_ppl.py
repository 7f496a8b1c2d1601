"""Perplexity: statistics against direct computations, scores against NumPy, simulated against served."""

import dataclasses
import math

import numpy as np
import pytest
from flax import nnx

from infer.evaluation import ppl
from infer.evaluation.statistics import Mean, clustered_mean, perplexity_change
from infer.evaluation.text import Rows, Text, rows_of
from infer.evaluation.variants import parse_variants
from mlaflax.cache import LatentCache
from mlaflax.checkpoint import CheckpointError
from mlaflax.config import AttentionConfig, ConfigError, MixedConfig, ModelConfig
from mlaflax.model import init_model

MIXED = MixedConfig(page=8, window=8, sinks=2, salient=6, probe_stride=4)
CONFIG = ModelConfig(
    vocab_size=96, num_layers=2, hidden_size=32, mlp_size=48, max_length=128, init_std=0.2, mixed=MIXED,
    attention=AttentionConfig(
        num_heads=2, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
    ),
)  # fmt: skip
ROWS = Rows(np.random.default_rng(0).integers(0, 96, (3, 80), np.int32), np.array([0, 0, 1]))


@pytest.fixture(scope="module")
def model():
    return init_model(CONFIG, seed=1)


def test_the_error_of_a_mean_counts_documents():
    rng = np.random.default_rng(0)
    values, documents = rng.normal(size=(5, 7)), np.array([3, 3, 1, 2, 1])
    got = clustered_mean(values, documents)
    mean = sum(x for row in values for x in row) / 35
    total = 0.0
    for d in (1, 2, 3):
        total += (
            sum(x - mean for row, name in zip(values, documents, strict=True) for x in row if name == d) ** 2
        )
    assert (got.tokens, got.documents) == (35, 3)
    np.testing.assert_allclose([got.mean, got.error], [mean, math.sqrt(3 / 2 * total) / 35], rtol=1e-12)
    assert clustered_mean(values, np.zeros(5)).error is None


def test_documents_of_a_token_each_give_the_usual_error():
    values = np.random.default_rng(1).normal(size=(50, 1))
    got = clustered_mean(values, np.arange(50))
    np.testing.assert_allclose(got.error, values.std(ddof=1) / math.sqrt(50), rtol=1e-12)


def test_a_repeated_document_does_not_make_the_error_smaller():
    values, documents = np.random.default_rng(2).normal(size=(6, 4)), np.arange(6)
    once = clustered_mean(values, documents)
    twice = clustered_mean(np.concatenate([values, values]), np.concatenate([documents, documents]))
    np.testing.assert_allclose(twice.error, once.error, rtol=1e-12)


def test_change_of_perplexity_in_percent():
    change = perplexity_change(Mean(math.log(1.02), 0.001, 10, 2))
    np.testing.assert_allclose([change.percent, change.error], [2.0, 0.102])


@pytest.mark.parametrize("at_once", [96, 96 * 50, 1 << 24])
def test_scores_are_those_of_numpy(model, at_once):
    rng = np.random.default_rng(3)
    base, this = rng.normal(size=(2, 3, 9, CONFIG.hidden_size)).astype(np.float32)
    tokens = rng.integers(0, 96, (3, 9), np.int32)
    got = ppl.score(*nnx.split(model), base, this, tokens, logits_at_once=at_once)
    embed = np.asarray(model.embed[...], np.float64)
    logits = (x[:, :-1].astype(np.float64) @ embed.T for x in (base, this))
    log_p, log_q = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in logits)
    nll = [[-log_q[b, i, tokens[b, i + 1]] for i in range(8)] for b in range(3)]
    np.testing.assert_allclose(got.nll, nll, atol=1e-4)
    np.testing.assert_allclose(got.kl, (np.exp(log_p) * (log_p - log_q)).sum(-1), atol=1e-4)
    np.testing.assert_array_equal(got.agrees, log_p.argmax(-1) == log_q.argmax(-1))


def test_measured_on_a_model(model):
    variants = parse_variants(["f32", "fp8", "mixed"], CONFIG)
    told = []
    result = ppl.measure(model, variants, ROWS, chunk=24, advance=told.append)
    assert len(told) == ppl.steps(ROWS, variants) == 4
    assert (result["rows"], result["documents"], result["far_from"]) == (3, 2, 64)
    by_name = result["variants"]
    same = by_name["bf16"]["all"]
    assert (same["nll_difference"], same["kl"], same["top1_agreement"]) == (0, 0, 1)
    assert (same["tokens"], by_name["bf16"]["far"]["tokens"]) == (3 * 79, 3 * 15)
    for name in ("bf16", "f32"):
        assert by_name[name]["real_minus_simulated"]["largest"] < 1e-4 * (10 if name == "bf16" else 1)
        assert abs(by_name[name]["real_minus_simulated"]["mean_nll_difference"]) < 1e-4
    for name in ("fp8", "mixed"):
        assert abs(by_name[name]["real_minus_simulated"]["mean_nll_difference"]) < 1e-3
        assert by_name[name]["all"]["kl"] > by_name["f32"]["all"]["kl"] > 0
    # Perplexity of the exact model, by hand.
    logits = np.asarray(model.logits(model(ROWS.tokens).hidden), np.float64)[:, :-1]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_p, ROWS.tokens[:, 1:, None], -1).mean()
    np.testing.assert_allclose(by_name["f32"]["all"]["nll"], nll, atol=1e-5)
    np.testing.assert_allclose(by_name["f32"]["all"]["perplexity"], math.exp(nll), rtol=1e-5)


def test_a_format_against_itself_differs_in_nothing(model):
    (variant,) = parse_variants(["f32"], CONFIG)[1:]
    again = dataclasses.replace(variant, name="again")
    result = ppl.measure(model, [variant, again], ROWS, real_cache=False)
    here = result["variants"]["again"]["all"]
    assert (here["nll_difference"], here["nll_difference_error"], here["kl"]) == (0, 0, 0)
    assert (here["perplexity_change_percent"], here["top1_agreement"]) == (0, 1)


def test_the_share_of_cold_tokens_is_what_the_cache_keeps(model):
    (_, mixed) = parse_variants(["mixed"], CONFIG)
    served = ppl.Served(model, mixed, chunk=40)
    _, cache = served.prefill(ROWS.tokens)
    assert isinstance(cache, LatentCache) and cache.hot is not None
    for layer in range(CONFIG.num_layers):
        kept = np.asarray(cache.hot.kept(layer, np.full(len(ROWS.tokens), 79 // MIXED.page)))
        assert set(np.sum(kept >= 0, axis=1)) == {MIXED.kept}
    # The last query, 79, is on page 9: pages 8 and 9 are near.
    assert ppl.cold_share(MIXED, 80)["last"] == (64 - 8) / 80
    # Queries 0 to 23 read at most 16 tokens before them hot, of which 8 are kept.
    assert ppl.cold_share(MIXED, 24)["mean"] == 0
    assert ppl.cold_share(MIXED, 32)["mean"] == pytest.approx(sum(8 / (i + 1) for i in range(24, 32)) / 32)
    assert ppl.cold_share(MIXED, 32, 24)["mean"] == pytest.approx(sum(8 / (i + 1) for i in range(24, 32)) / 8)


def test_weights_that_are_no_numbers_are_reported():
    broken = init_model(CONFIG, seed=1)
    broken.embed[...] = broken.embed[...].at[0].set(np.nan)
    with pytest.raises(CheckpointError, match="not numbers for 100% of the tokens"):
        ppl.measure(broken, parse_variants(["fp8"], CONFIG), ROWS, real_cache=False)


def test_rows_are_pieces_of_single_documents():
    documents = [np.arange(100 * i, 100 * i + n, dtype=np.int32) for i, n in enumerate((9, 30, 10, 25))]
    rows = rows_of(Text("documents", documents), 10)
    assert len(rows.tokens) == 3 + 1 + 2
    assert set(rows.documents[:3]) == {1, 2, 3}  # the first piece of each document before the second of any
    for tokens, document in zip(rows.tokens, rows.documents, strict=True):
        assert tokens[0] % 10 == 0 and tokens[0] // 100 == document
        np.testing.assert_array_equal(tokens, np.arange(tokens[0], tokens[0] + 10))
    assert len(np.unique(rows.tokens)) == 60
    assert len(rows_of(Text("documents", documents), 10, max_rows=2).tokens) == 2
    assert set(rows_of(Text("documents", documents), 10, max_documents=1).documents) <= {1, 2, 3}
    with pytest.raises(ConfigError, match="context = 31: must not exceed the 30 tokens of the longest"):
        rows_of(Text("documents", documents), 31)
