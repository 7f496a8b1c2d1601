"""Needles: where they lie, what counts as found, and which of them a mixed cache reads cold."""

import numpy as np
import pytest

from infer.evaluation import needle
from infer.evaluation.needle import CacheReader, Grid, haystack
from infer.evaluation.text import Text
from infer.evaluation.variants import parse_variants
from mlaflax.config import AttentionConfig, ConfigError, MixedConfig, ModelConfig
from mlaflax.model import init_model
from mlaflax.tokenizer import Tokenizer
from train.data.needle import VALUE_TOKENS, NeedleTask

NAMES = [
    a + b + c
    for a in ("bal", "cor", "dun", "fen", "gar", "hol")
    for b in ("a", "i", "o")
    for c in ("mer", "tis", "wen", "lor")
]
MIXED = MixedConfig(page=8, window=8, sinks=2, salient=2, probe_stride=4)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train((f"The key of {name} is {name} ." for name in NAMES * 5), 600)


@pytest.fixture(scope="module")
def task(tokenizer):
    return NeedleTask(tokenizer)


DOCUMENTS = [np.full(n, 7 + i, np.int32) for i, n in enumerate((13, 40, 5))]


def find(text: np.ndarray, part) -> list[int]:
    return [i for i in range(len(text) - len(part) + 1) if list(text[i : i + len(part)]) == list(part)]


def test_facts_lie_at_their_depths(task):
    stack = haystack(task, DOCUMENTS, 500, 4, np.random.default_rng(0))
    question, answer = task.question(stack.facts[0])
    assert len(stack.tokens) + len(question) + len(answer) == 500
    plain = len(stack.tokens) - 4 * task.statement_length
    for i, (fact, span, value) in enumerate(zip(stack.facts, stack.statements, stack.answers, strict=True)):
        assert find(stack.tokens, task.statement(fact)) == [span[0]]
        assert list(stack.tokens[slice(*value)]) == list(fact.value)
        assert span[0] == round((i + 0.5) / 4 * plain) + i * task.statement_length
    for fact in stack.absent:
        assert not find(stack.tokens, task.question(fact)[0])
    with pytest.raises(ConfigError, match="lengths = 40: must be at least"):
        haystack(task, DOCUMENTS, 40, 4, np.random.default_rng(0))


class Forgetful:
    """Finds a question in the text and answers what follows it, but for the facts of some places."""

    def __init__(self, forgets: range = range(0), near: range | None = None):
        self._forgets, self._near = forgets, near

    def read(self, tokens):
        return tokens

    def knows(self, state, question, answer):
        found = find(state, question)
        return (
            bool(found)
            and found[0] not in self._forgets
            and list(state[found[0] + len(question) :][: len(answer)]) == list(answer)
        )

    def near(self, state):
        return None if self._near is None else np.isin(np.arange(len(state)), self._near)


def test_what_is_found_and_lost(task):
    stacks = needle.haystacks(task, Text("documents", DOCUMENTS), [300, 600], 4, 3, seed=0)
    lengths = {n: len(stacks[n][0].tokens) for n in (300, 600)}
    late = stacks[600][0].statements[3][0]
    told = []
    result = needle.measure(
        {
            "bf16": Forgetful(range(60)),  # the first needle of the short texts begins there
            "x": Forgetful(range(late, lengths[600]), near=range(150, 10_000)),
        },
        task,
        stacks,
        told.append,
    )
    assert len(told) == needle.steps(stacks, 2) == 2 * 6 + 2
    assert 0 < stacks[300][0].statements[0][0] < 60 < stacks[600][0].statements[0][0]
    base, other = result["variants"]["bf16"], result["variants"]["x"]
    assert (base["trials"], base["hits"], base["cold"]) == (24, 21, None)
    assert base["lengths"][300]["hit_rate_by_depth"] == [0, 1, 1, 1]
    assert (other["hits"], other["baseline_found"], other["lost"]) == (21, 21, 3)
    assert other["lengths"][600]["hit_rate_by_depth"] == [1, 1, 1, 0]
    cold = sum(b <= 150 for n in stacks for stack in stacks[n] for _, b in stack.answers)
    whole = sum(b <= 150 for n in stacks for stack in stacks[n] for _, b in stack.statements)
    # Of the cold ones the baseline misses the first needle of each short text.
    assert other["cold"] == {
        "needles": cold, "share": cold / 24, "hits": cold, "baseline_found": cold - 3, "lost": 0,
    }  # fmt: skip
    assert other["all_cold"]["needles"] == whole <= cold
    assert result["chance"]["measured"] == {300: 0, 600: 0}
    assert result["chance"]["computed"] == len(task.words) ** -float(VALUE_TOKENS)
    assert (result["trials_per_depth"], result["depths"]) == (3, [0.125, 0.375, 0.625, 0.875])


def test_rates_of_hand_made_grids():
    hits = np.array([[1, 0], [1, 1]], bool)
    lost = needle.summary({"bf16": {8: Grid(hits)}, "x": {8: Grid(~hits, hits, ~hits)}}, "bf16")["variants"][
        "x"
    ]
    assert (lost["hits"], lost["lost"], lost["lengths"][8]["hit_rate"]) == (1, 3, 0.25)
    assert lost["cold"] == {"needles": 3, "share": 0.75, "hits": 0, "baseline_found": 3, "lost": 3}
    assert lost["all_cold"] == {"needles": 1, "share": 0.25, "hits": 1, "baseline_found": 0, "lost": 0}


@pytest.fixture(scope="module")
def model(tokenizer):
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, num_layers=2, hidden_size=32, mlp_size=48, max_length=256, mixed=MIXED,
        init_std=0.2, attention=AttentionConfig(
            num_heads=2, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
        ),
    )  # fmt: skip
    return init_model(config, seed=2)


def test_the_cache_answers_as_the_model_does_and_stays_as_it_is(model):
    text = np.random.default_rng(0).integers(0, model.config.vocab_size, 90).astype(np.int32)
    (exact,) = parse_variants(["f32"], model.config)[1:]
    reader = CacheReader(model, exact, 120)
    state = reader.read(text)
    question = [5, 9, 11]
    answer = []
    for _ in range(2):
        tokens = np.array([[*text, *question, *answer]], np.int32)
        answer.append(int(np.argmax(model.logits(model(tokens).hidden[0, -1]))))
    for _ in range(2):  # the second time from the same cache
        assert reader.knows(state, question, answer)
        assert not reader.knows(state, question, [answer[0], (answer[1] + 1) % 90])
        assert not reader.knows(state, question, [(answer[0] + 1) % 90, answer[1]])
    assert reader.near(state) is None


def test_near_is_the_window_and_what_any_layer_keeps(model):
    (mixed,) = parse_variants(["mixed"], model.config)[1:]
    reader = CacheReader(model, mixed, 120)
    state = reader.read(np.arange(90, dtype=np.int32))
    near = reader.near(state)
    # The first token asked would be 90, on page 11: pages 10 and 11 are near, from 80 on.
    kept = {0, 1, *np.asarray(state[1].hot.index).ravel().tolist()}
    np.testing.assert_array_equal(np.flatnonzero(near), sorted({*kept, *range(80, 90)}))
    assert 4 <= len(kept) <= 6
