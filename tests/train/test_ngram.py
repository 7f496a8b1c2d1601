import functools
import math
from fractions import Fraction

import numpy as np
import pytest

from mlaflax.config import ConfigError
from train.ngram import InterpolatedBigram, KneserNeyTrigram

MODELS = [InterpolatedBigram, KneserNeyTrigram]


def documents(seed, count, vocab, longest=60):
    """Text with structure: a random walk that mostly steps to one of three successors."""
    rng = np.random.default_rng(seed)
    steps = np.random.default_rng(0).integers(vocab, size=(vocab, 3))
    out = []
    for _ in range(count):
        ids = [int(rng.integers(vocab))]
        for _ in range(int(rng.integers(1, longest))):
            ids.append(int(rng.integers(vocab) if rng.random() < 0.2 else steps[ids[-1], rng.integers(3)]))
        out.append(np.array(ids, np.uint16))
    return out


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("count", [1, 3, 200])
def test_probabilities_are_positive_and_sum_to_one(model, count):
    fitted = model(documents(1, count, 40), 50)  # ids 40 to 49 are never seen
    for context in [[0], [7], [45], [3, 4], [4, 3], [45, 3], [3, 45], [46, 45]]:
        p = fitted.distribution(context)
        assert p.shape == (50,) and (p > 0).all()
        assert p.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_perplexity_scores_every_token_but_the_first(model):
    fitted, held_out = model(documents(1, 100, 40), 40), documents(2, 20, 40)
    logs = [
        math.log(fitted.distribution(list(map(int, d[max(i - 2, 0) : i])))[d[i]])
        for d in held_out
        for i in range(1, len(d))
    ]
    np.testing.assert_allclose(fitted.log_probabilities(held_out), logs, rtol=1e-12)
    assert fitted.perplexity(held_out) == pytest.approx(math.exp(-np.mean(logs)))


def test_structure_is_learned_and_more_context_does_not_hurt():
    train, held_out = documents(1, 2000, 60), documents(2, 100, 60)
    # The walk's own perplexity: .8 over three successors, .2 over all sixty.
    ideal = math.exp(-(0.8 * math.log(0.8 / 3 + 0.2 / 60) + 0.2 * math.log(0.2 / 60)))
    for model in MODELS:
        assert ideal * 0.9 < model(train, 60).perplexity(held_out) < ideal * 1.15


def test_noise_has_the_perplexity_of_its_vocabulary():
    rng = np.random.default_rng(0)
    train, held_out = ([rng.integers(8, size=500) for _ in range(n)] for n in (400, 20))
    for model in MODELS:
        assert model(train, 8).perplexity(held_out) == pytest.approx(8, rel=0.01)


def naive_kneser_ney(train, vocab):
    """Chen and Goodman's formulas word for word, in exact fractions, over sets and dictionaries."""
    grams = {3: {}, 2: {}, 1: {}}
    for d in train:
        padded = ["start", *map(int, d)]
        for gram in zip(padded, padded[1:], padded[2:], strict=False):
            grams[3][gram] = grams[3].get(gram, 0) + 1
    for order in (2, 1):
        for gram in grams[order + 1]:
            grams[order][gram[1:]] = grams[order].get(gram[1:], 0) + 1

    @functools.cache
    def discount(order, count):
        n = [sum(c == r for c in grams[order].values()) for r in range(5)]
        y = Fraction(n[1], n[1] + 2 * n[2])
        r = min(count, 3)
        return 0 if r == 0 else r - (r + 1) * y * Fraction(n[r + 1], n[r])

    @functools.cache
    def probability(context, token):
        order = len(context) + 1
        below = Fraction(1, vocab) if order == 1 else probability(context[1:], token)
        same = {g: c for g, c in grams[order].items() if g[:-1] == context}
        if not same:
            return below
        total = sum(same.values())
        freed = sum(discount(order, c) for c in same.values())
        count = same.get((*context, token), 0)
        return (count - discount(order, count)) / Fraction(total) + freed / Fraction(total) * below

    return probability


def test_kneser_ney_equals_the_formulas_in_exact_fractions():
    rng = np.random.default_rng(3)
    train = [np.minimum(rng.zipf(1.3, size=60), 150) for _ in range(60)]
    exact = naive_kneser_ney(train, 160)
    fitted = KneserNeyTrigram(train, 160)
    for context in [(1,), (159,), (1, 1), (2, 1), (1, 5), (159, 3), (3, 159)]:
        full = ("start", *context)[-2:]
        want = [float(exact(full, t)) for t in range(160)]
        np.testing.assert_allclose(fitted.distribution(context), want, rtol=1e-12)


def test_kneser_ney_knows_which_words_follow_few_others():
    # "Francisco" (2) is frequent but only ever follows "San" (1); 3 is rarer but follows many.
    train = [np.array([1, 2] * 40)] + [np.array([w, 3]) for w in range(4, 24)]
    fitted = KneserNeyTrigram(train, 40)
    unseen = fitted.distribution([30])
    assert unseen[3] > 5 * unseen[2]


def test_bigram_by_hand():
    # Every target has bigram probability 1, so the bigram gets all the weight but the 1/1000 that the uniform
    # distribution is promised.
    fitted = InterpolatedBigram([np.array([0, 1] * 500)], 4)
    np.testing.assert_allclose(fitted.distribution([0]), [0.00025, 0.99925, 0.00025, 0.00025], atol=1e-6)
    # After a token that was never seen: nearly the unigram distribution, half and half.
    np.testing.assert_allclose(fitted.distribution([3])[:2], 0.475, atol=0.02)


@pytest.mark.parametrize("model", MODELS)
def test_misuse_is_named(model):
    with pytest.raises(ConfigError, match="at least two tokens"):
        model([np.array([1])], 10)
    with pytest.raises(ConfigError, match=r"vocab_size = 10: must exceed the largest token id \(12\)"):
        model([np.array([1, 12])], 10)
