import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mlaflax.config import ConfigError
from mlaflax.decode.sampling import MAX_LOGPROBS, SamplingArrays, SamplingParams, probabilities, sample

jitted_sample = jax.jit(sample)
jitted_probabilities = jax.jit(probabilities)


def oracle(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The filtered distribution of one row by sorting, in float64.

    Also the tokens at the edge of the nucleus that a sum in float32 may put on either side.
    """
    logits = np.asarray(logits, np.float64)
    edge = np.zeros(len(logits), bool)
    if temperature == 0:
        kept = logits == logits.max()
        return kept / kept.sum(), edge
    z = (logits - logits.max()) / temperature
    kept = np.isfinite(z)
    descending = -np.sort(-z)
    if 0 < top_k < len(z):
        kept &= z >= descending[top_k - 1]
    p = np.where(kept, np.exp(z), 0)
    p /= p.sum()
    if top_p < 1:
        _, group = np.unique(-p, return_inverse=True)
        mass = np.bincount(group, p)
        mass_above = (np.cumsum(mass) - mass)[group]
        kept &= mass_above < top_p
        edge = np.abs(mass_above - top_p) < 1e-6
    kept &= p >= min_p * p.max()
    p = np.where(kept, p, 0)
    return p / p.sum(), edge


def assert_same_distribution(logits, params):
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    got = np.asarray(jitted_probabilities(logits, SamplingArrays.stack([params] * len(logits))))
    fields = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    for row, logit in zip(got, logits, strict=True):
        expected, edge = oracle(logit, **fields)
        assert edge.sum() < 20
        np.testing.assert_array_equal((row > 0) | edge, (expected > 0) | edge)
        np.testing.assert_allclose(row[~edge], expected[~edge], rtol=2e-5, atol=1e-7)


def language_like(rng, b, w):
    """Logits that fall like a language model's: a short head, a long tail, in random order."""
    ranks = rng.permuted(np.tile(np.arange(w), (b, 1)), axis=1)
    return (-1.8 * np.log1p(ranks) + rng.normal(size=(b, w))).astype(np.float32)


def draw(logits, params, step=None):
    """`sample` in slots 0, 1, ... of a wider batch and vocabulary: most tests share one compiled program."""
    b, w = logits.shape
    padded = np.full((16, 5000), -np.inf, np.float32)
    padded[:, 0] = 0
    padded[:b, :w] = logits
    steps = np.zeros(16, np.int32)
    steps[:b] = 0 if step is None else step
    out = jitted_sample(padded, SamplingArrays.stack([*params, *[None] * (16 - b)]), steps)
    return type(out)(*(np.asarray(x)[:b] for x in out))


SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40),
    SamplingParams(top_k=64),
    SamplingParams(top_k=65),
    SamplingParams(top_k=500),
    SamplingParams(top_k=999_999_999_999),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.5, temperature=1.7),
    SamplingParams(top_p=0.999),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02),
    SamplingParams(temperature=1.3, top_k=700, top_p=0.8, min_p=0.001),
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
@pytest.mark.parametrize("w", [50, 65, 4096])
@pytest.mark.parametrize("shape", ["language", "flat"])
def test_distribution_is_that_of_the_sorting_oracle(params, w, shape):
    rng = np.random.default_rng(w)
    logits = language_like(rng, 3, w) if shape == "language" else rng.normal(size=(3, w)).astype(np.float32)
    assert_same_distribution(logits, params)


def test_distribution_at_the_size_of_a_real_vocabulary():
    rng = np.random.default_rng(0)
    logits = np.concatenate([language_like(rng, 2, 32_003), rng.normal(size=(2, 32_003))])
    for params in (SamplingParams(top_p=0.9), SamplingParams(top_k=2000, top_p=0.7, temperature=0.9)):
        assert_same_distribution(logits, params)


@given(
    levels=st.lists(st.integers(-12, 0), min_size=1, max_size=300),
    top_k=st.integers(0, 310),
    top_p=st.sampled_from([0.07, 0.31, 0.53, 0.77, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.4]),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
)
@settings(max_examples=150, deadline=None)
def test_ties_stay_or_go_together(levels, top_k, top_p, min_p, temperature):
    # Few distinct values, so that nearly every threshold falls among ties. Padded to one shape.
    logits = np.full(300, -np.inf, np.float32)
    logits[: len(levels)] = np.array(levels, np.float32) / 2
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert_same_distribution(logits, params)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=11),
        SamplingParams(temperature=0.7, top_k=100, top_p=0.9, seed=12),
        SamplingParams(temperature=1.4, min_p=0.05, seed=13),
        SamplingParams(temperature=1.0, top_k=130, seed=14),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params):
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=300) * 2).astype(np.float32)
    draws = 40_000
    batch = 1000
    arrays = SamplingArrays.stack([params] * batch)
    tiled = np.tile(logits, (batch, 1))
    tokens = [
        np.asarray(jitted_sample(tiled, arrays, np.arange(i, i + batch, dtype=np.int32)).token)
        for i in range(0, draws, batch)
    ]
    counts = np.bincount(np.concatenate(tokens), minlength=300)
    fields = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    expected = oracle(logits, **fields)[0] * draws
    assert counts[expected == 0].sum() == 0
    # Chi-square needs a few expected counts per cell: pool the rare tokens.
    common = expected >= 8
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert stats.chisquare(observed, wanted, sum_check=False).pvalue > 0.01


def test_different_seeds_draw_independently():
    logits = np.zeros((1000, 300), np.float32)
    logits[:, 4:] = -np.inf
    arrays = SamplingArrays.stack([SamplingParams(seed=s) for s in range(1000)])
    now, after = (np.asarray(jitted_sample(logits, arrays, np.full(1000, i, np.int32)).token) for i in (0, 1))
    table = np.zeros((4, 4))
    np.add.at(table, (now, after), 1)
    assert stats.chi2_contingency(table).pvalue > 0.01
    assert stats.chisquare(table.sum(0)).pvalue > 0.01


def test_a_sequence_does_not_depend_on_its_batch():
    rng = np.random.default_rng(1)
    logits = np.concatenate([language_like(rng, 8, 5000), rng.normal(size=(8, 5000)).astype(np.float32)])
    params = [dataclasses.replace(p, seed=i, logprobs=5) for i, p in enumerate(SETTINGS)]
    step = np.arange(16, dtype=np.int32) * 3
    together = draw(logits, params, step)
    order = rng.permutation(16)
    shuffled = draw(logits[order], [params[i] for i in order], step[order])
    for whole, part in zip(together, shuffled, strict=True):
        np.testing.assert_array_equal(whole[order], part)
    for i in range(16):
        among_empty_slots = draw(logits[i : i + 1], [params[i]], step[i : i + 1])
        alone = jitted_sample(logits[i : i + 1], SamplingArrays.stack([params[i]]), step[i : i + 1])
        assert int(among_empty_slots.token[0]) == int(alone.token[0]) == int(together.token[i])


def test_logprobs_are_of_the_untempered_unfiltered_model():
    rng = np.random.default_rng(2)
    logits = language_like(rng, 4, 777)
    out = draw(logits, [SamplingParams(temperature=0.5, top_k=3, logprobs=MAX_LOGPROBS, seed=9)] * 4)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    order = np.argsort(-exact, axis=1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(out.top_ids, order)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(exact, order, 1), atol=2e-6)
    np.testing.assert_allclose(out.logprob, exact[np.arange(4), out.token], atol=2e-6)
    assert (out.token[:, None] == order[:, :3]).any(1).all()


def test_top_logprobs_rank_equal_tokens_by_id():
    logits = np.zeros((1, 5000), np.float32)
    logits[0, [4000, 4001, 130]] = 1.0
    out = draw(logits, [SamplingParams(logprobs=20)])
    assert out.top_ids[0].tolist() == [130, 4000, 4001, *range(17)]


def test_top_logprobs_are_absent_where_there_are_too_few_tokens_or_nobody_asks():
    for asked, known in ((20, 6), (0, 0)):
        out = draw(np.zeros((1, 6), np.float32), [SamplingParams(temperature=0.0, logprobs=asked)])
        assert out.top_ids[0].tolist() == [*range(known), *[-1] * (20 - known)]
        assert np.isneginf(out.top_logprobs[0, known:]).all()


def test_greedy_takes_the_lowest_id_among_equals_and_ignores_filters():
    logits = np.zeros((2, 3000), np.float32)
    logits[0, [2900, 260, 300]] = 2.0
    out = draw(logits, [SamplingParams(temperature=0.0, top_k=5, top_p=0.1, min_p=1.0), None])
    assert out.token.tolist() == [260, 0]


@pytest.mark.parametrize("temperature", [1e-38, 1e-3])
def test_low_temperatures_approach_greedy_without_overflow(temperature):
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=(4, 500)) * 100).astype(np.float32)
    out = draw(logits, [SamplingParams(temperature=temperature, top_p=0.9)] * 4)
    assert np.isfinite(out.logprob).all()
    np.testing.assert_array_equal(out.token, logits.argmax(1))


def test_a_huge_temperature_makes_the_nucleus_even():
    logits = np.full((3, 4096), -np.inf, np.float32)
    logits[:, :500] = np.random.default_rng(3).normal(size=(3, 500)) * 100
    params = SamplingParams(temperature=1e30, top_p=0.9)
    got = np.asarray(jitted_probabilities(logits, SamplingArrays.stack([params] * 3)))
    assert (got > 0).sum(1).tolist() == [450] * 3
    np.testing.assert_allclose(got[got > 0], 1 / 450, rtol=1e-4)


def test_excluded_tokens_are_never_drawn():
    rng = np.random.default_rng(4)
    logits = np.full((1000, 300), -np.inf, np.float32)
    allowed = rng.choice(300, 90, replace=False)
    logits[:, allowed] = rng.normal(size=(1000, 90))
    for params in SETTINGS:
        arrays = SamplingArrays.stack([params] * 1000)
        out = jitted_sample(logits, arrays, np.arange(1000, dtype=np.int32))
        assert np.isin(np.asarray(out.token), allowed).all(), params


def test_one_program_serves_every_setting():
    before = jitted_sample._cache_size()
    draw(np.zeros((1, 9), np.float32), [None])
    once = jitted_sample._cache_size()
    for i, params in enumerate(SETTINGS):
        draw(np.zeros((2, 40), np.float32), [params, None], i)
    assert jitted_sample._cache_size() == once <= before + 1


def test_types_are_promoted_nowhere_by_accident():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        arrays = jax.tree.map(jnp.asarray, SamplingArrays.stack([SamplingParams(top_p=0.9)] * 2))
        out = jax.eval_shape(sample, jnp.zeros((2, 500), jnp.bfloat16), arrays, jnp.zeros(2, jnp.int32))
    assert [x.dtype for x in out] == [jnp.int32, jnp.float32, jnp.float32, jnp.int32]


def test_no_operation_sorts_the_vocabulary():
    w = 129_280
    arrays = SamplingArrays.stack([SamplingParams(top_p=0.9, logprobs=5)])
    text = str(jax.make_jaxpr(sample)(jnp.zeros((1, w)), arrays, jnp.zeros(1, jnp.int32)))
    sorted_shapes = [line for line in text.splitlines() if " sort[" in line or "top_k[" in line]
    assert sorted_shapes
    assert not any(str(w) in line or str(w // 128) + ",128]" in line for line in sorted_shapes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**32),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("stop", ("",)),
        ("stop", "END"),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_a_wrong_value_is_named(field, value):
    with pytest.raises(ConfigError, match=rf"^{field} = .*: must "):
        SamplingParams(**{field: value})
