"""Needles: facts in real text, questions that only they answer, and positions that skip."""

import dataclasses
import itertools
import json
import random
from collections import Counter

import numpy as np
import pytest

from mlaflax.config import ConfigError
from mlaflax.tokenizer import Tokenizer
from train.data import DataConfig, needle, pipeline, prepare
from train.data.needle import NeedleTask, skipped_positions

FIELDS = ["loss_mask", "positions", "segment_ids", "targets", "tokens"]
WORDS = [f"{a}{b}{c}" for a in "bcdfgh" for b in "aeiou" for c in ("nder", "stle", "llow", "rmic")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Prepared text of 40 documents of up to 900 words, most of which the tokenizer knows as one token."""
    root, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    for i in range(40):
        (root / f"{i}.txt").write_text(" ".join(rng.choices(WORDS, k=rng.randint(20, 900))) + ".\n")
    config = DataConfig(
        paths=(str(root),),
        sequence_length=256,
        batch_size=4,
        held_out_fraction=0.1,
        align=32,
        needle_share=0.5,
        needle_facts=4,
        position_span=4096,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
    )
    return prepare(config, 512)


@pytest.fixture(scope="module")
def task(data):
    return NeedleTask(data.tokenizer)


def change(data, **fields):
    return dataclasses.replace(data, config=dataclasses.replace(data.config, **fields))


def find(tokens, ids):
    """Where `ids` stand in `tokens`."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(ids))
    return list(np.flatnonzero((windows == np.array(ids)).all(1)))


def test_a_statement_is_a_question_and_its_answer(task, data):
    fact = task.fact(np.random.default_rng(0))
    question, answer = task.question(fact)
    statement = task.statement(fact)
    assert len(statement) == task.statement_length
    assert statement[: len(question)] == question and list(fact.value) == answer
    text = data.tokenizer.decode(statement)
    words = [data.tokenizer.decode(part) for part in (fact.key, fact.value)]
    assert text == f"{needle.MARKER}{words[0]}{words[1]}{needle.END}"


def test_no_word_is_said_twice_and_a_guess_is_hopeless(task):
    rng = np.random.default_rng(1)
    values = Counter()
    for _ in range(100):
        facts = task.facts(12, rng)
        words = [word for fact in facts for word in (*fact.key, *fact.value)]
        assert len(set(words)) == len(words) == 12 * (needle.KEY_TOKENS + needle.VALUE_TOKENS)
        values.update(fact.value[:2] for fact in facts)
    # Even the first two words of a value are hardly ever the same among 1200 values.
    assert values.most_common(1)[0][1] <= 4
    assert len(task.words) > 80


def test_inserting_keeps_the_text_and_asks_after_telling(task):
    rng = np.random.default_rng(2)
    text = np.arange(1000, 3000)  # no id of the vocabulary: what is text is known by its ids
    for _ in range(20):
        facts = task.facts(12, rng)
        asked = [*facts[:5], *facts[:3]]
        told = task.insert(text, facts, rng, asked)
        kept = told.tokens[told.tokens >= 1000]
        np.testing.assert_array_equal(kept, text[: len(kept)])
        assert len(told.tokens) == len(text) == len(kept) + task.statement_length * 20
        predictable = told.tokens >= 1000
        answers = np.zeros(len(text), bool)
        for fact in facts:
            question, value = task.question(fact)
            at = find(told.tokens, task.statement(fact))
            assert len(at) == 1 + asked.count(fact) == len(find(told.tokens, question))
            for said, start in enumerate(at):
                value_start = start + len(question)
                value_end = value_start + len(value)
                predictable[value_start:value_end] = said > 0
                answers[value_start:value_end] = said > 0
                predictable[value_end : start + task.statement_length] = True
        np.testing.assert_array_equal(told.predictable, predictable)
        np.testing.assert_array_equal(told.answers, answers)
        assert answers.sum() == len(asked) * needle.VALUE_TOKENS


def test_facts_for_evaluation_lie_at_all_depths(task):
    rng = np.random.default_rng(3)
    text = np.arange(1000, 2000)
    depths = [
        find(task.insert(text, [fact], rng).tokens, task.statement(fact))[0] / len(text)
        for fact in (task.fact(rng) for _ in range(200))
    ]
    assert min(depths) < 0.05 and max(depths) > 0.95 and 0.4 < np.mean(depths) < 0.6


def test_needles_and_skips_are_in_batches_as_they_should_be(data, task):
    iterator = change(data, needle_share=0.6).train_iterator()
    length, align, span = data.config.sequence_length, data.config.align, data.config.position_span
    facts = data.config.needle_facts
    marker = task.question(task.fact(np.random.default_rng(0)))[0][: -needle.KEY_TOKENS]
    carrying, pieces, skips = 0, 0, 0
    for batch in itertools.islice(iterator, 60):
        for row in range(len(batch["tokens"])):
            tokens, targets, positions, ids, learned = (
                batch[name][row] for name in ("tokens", "targets", "positions", "segment_ids", "loss_mask")
            )
            assert not learned[ids == 0].any()
            for i in range(1, ids.max() + 1):
                at = np.flatnonzero(ids == i)
                assert at[0] % align == 0 and (np.diff(at) == 1).all()
                np.testing.assert_array_equal(targets[at][:-1], tokens[at][1:])
                assert positions[at[0]] == 0 and positions[at[-1]] < span
                steps = np.diff(positions[at])
                assert (steps > 0).all() and ((steps - 1) % align == 0).all()
                assert ((at[1:][steps > 1] - at[0]) % align == 0).all()
                skips += (steps > 1).sum()
                told = not learned[at].all()
                if not told:
                    assert (steps == 1).all()
                if len(at) == length:
                    pieces, carrying = pieces + 1, carrying + told
                    if told:
                        said = len(find(tokens[at], marker))
                        # Targets begin with the second token: one of a marker at the very start is not there.
                        chance = said * (len(marker) + needle.KEY_TOKENS) + facts * needle.VALUE_TOKENS
                        assert said == facts * (1 + data.config.needle_questions)
                        assert chance - 1 <= (learned[at] == 0).sum() <= chance
    iterator.close()
    assert pieces > 100 and 0.4 < carrying / pieces < 0.8 and skips > 50


def test_a_piece_has_the_same_needles_on_any_number_of_hosts(data):
    pieces = len(pipeline.Pieces(data.train, data.config.sequence_length))

    def drawn(hosts):
        found = set()
        for host in range(hosts):
            iterator = change(data, needle_share=1.0, prefetch=0).train_iterator(None, host, hosts)
            # Batches of 4 rows in all: enough of them for an epoch and the rows held back for packing.
            for batch in itertools.islice(iterator, (pieces + 300) // 4):
                for row, ids in enumerate(batch["segment_ids"]):
                    for at in (ids == i for i in range(1, ids.max() + 1)):
                        found.add((batch["tokens"][row][at].tobytes(), batch["positions"][row][at].tobytes()))
        return found

    assert len(drawn(1)) == pieces
    assert drawn(1) == drawn(2)


def test_resuming_is_exact(data):
    iterator, states, batches = data.train_iterator(), [], []
    for _ in range(30):
        states.append(json.dumps(iterator.get_state()))
        batches.append(next(iterator))
    iterator.close()
    for start in (0, 1, 17, 29):
        resumed = data.train_iterator(json.loads(states[start]))
        for want in batches[start : start + 3]:
            got = next(resumed)
            for name in FIELDS:
                np.testing.assert_array_equal(got[name], want[name])
        resumed.close()
    for fields in (
        {"needle_share": 0.4},
        {"needle_facts": 3},
        {"needle_questions": 1},
        {"position_span": 2048},
        {"align": 64},
    ):
        (name,) = fields
        with pytest.raises(ConfigError, match=rf"data\.{name} = .*: cannot resume"):
            change(data, **fields).train_iterator(json.loads(states[0]))


def test_evaluation_has_neither_needles_nor_skips(data):
    batches = list(data.eval_batches(4, 256))
    plain = list(change(data, needle_share=0.0, position_span=0).eval_batches(4, 256))
    targets = []
    for batch, want in zip(batches, plain, strict=True):
        for name in FIELDS:
            np.testing.assert_array_equal(batch[name], want[name])
        np.testing.assert_array_equal(batch["loss_mask"], batch["segment_ids"] > 0)
        targets.append(batch["targets"][batch["loss_mask"] == 1])
    text = np.concatenate([d[1:] for d in data.held_out_documents])
    np.testing.assert_array_equal(np.sort(np.concatenate(targets)), np.sort(text))


def test_skips_reach_the_span():
    rng = np.random.default_rng(4)
    for length, span, align in [(2048, 32_768, 128), (100, 128, 1), (256, 256, 32), (90, 4096, 32)]:
        drawn = np.stack([skipped_positions(length, span, align, rng) for _ in range(300)])
        assert drawn.dtype == np.int32 and (drawn[:, 0] == 0).all()
        steps = np.diff(drawn)
        assert (steps > 0).all() and drawn.max() < span
        rows, places = np.nonzero(steps > 1)
        assert ((places + 1) % align == 0).all() and ((steps[rows, places] - 1) % align == 0).all()
        if span >= 2 * length:
            assert drawn.max() > 0.9 * span and (steps == 1).all(1).any()


def test_what_cannot_be(data, tmp_path):
    def config(**fields):
        return dataclasses.replace(data.config, **fields)

    for fields, message in [
        ({"align": 0}, "data.align = 0: must be greater than 0"),
        ({"align": 48}, r"data.sequence_length = 256: must be a multiple of data.align \(48\)"),
        ({"needle_share": 1.5}, "data.needle_share = 1.5: must lie between 0 and 1"),
        ({"needle_share": -0.1}, "data.needle_share = -0.1: must lie between 0 and 1"),
        ({"position_span": 255}, "data.position_span = 255: must be 0 or at least data.sequence_length"),
        ({"needle_share": 0.0}, "data.position_span = 4096: needs a data.needle_share above 0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            config(**fields)
    with pytest.raises(ConfigError, match=r"sequence_length = 100: must be a multiple of data.align \(32\)"):
        next(data.eval_batches(4, 100))
    with pytest.raises(
        ConfigError, match=r"data.needle_facts = 40: takes .* more than data.sequence_length \(256\)"
    ):
        change(data, needle_facts=40).train_iterator()
    few = Tokenizer.train(["a b c d"], 300)
    with pytest.raises(ConfigError, match=r"facts = 3: .* words are too few for facts of 6 words each"):
        NeedleTask(few).facts(3, np.random.default_rng(0))
