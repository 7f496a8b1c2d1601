"""Needles: facts put into real text, and questions that only a model that finds them again can answer.

    The key function return upon thou matrix people.

is a statement: marker, two words of a key, four of its value, end. The first time it tells a fact; said again, it
is a question whose answer, the value, nothing but the first time gives away. The words are drawn at random from the
tokenizer's vocabulary, so a guess is right less than once in a million.

    task = NeedleTask(tokenizer)
    facts = task.facts(4, rng)                 # rng: numpy.random.Generator
    told = task.insert(text, facts, rng)       # told.tokens, told.predictable
    question, answer = task.question(facts[0])

All is pure: the same generator gives the same text.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from mlaflax.config import require
from mlaflax.tokenizer import Tokenizer

# The key is followed by its value at once. With a word such as "is" between them the value must be found by a word
# two tokens back, which takes a small model much longer to learn.
MARKER, END = "\nThe key", "."
KEY_TOKENS, VALUE_TOKENS = 2, 4

# Facts are told in this first part of a piece, so that there is room to ask for the last one.
_TOLD_WITHIN = 0.7
# The nearest question follows after this part of what is left of the piece.
_NEAREST = 0.01
# Letters of a word that is drawn: shorter entries of a vocabulary are mostly parts of words.
_LETTERS = 4
_MOST_SKIPS = 4


@dataclasses.dataclass(frozen=True)
class Fact:
    """Token ids of a key and of its value."""

    key: tuple[int, ...]
    value: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Told:
    """Text with statements in it.

    Attributes:
      tokens: int32 `[n]`.
      predictable: bool `[n]`, false for tokens that are there by chance: markers, keys, and values that are
        told for the first time.
      answers: bool `[n]`, true for the values of questions.
    """

    tokens: np.ndarray
    predictable: np.ndarray
    answers: np.ndarray


class NeedleTask:
    """Facts and questions in the token ids of `tokenizer`.

    Attributes:
      words: int32 `[n]`, ids of the words that keys and values are drawn from.
      statement_length: tokens in a statement, the same for all.

    Raises:
      ConfigError: the vocabulary holds too few words.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._marker, self._end = tokenizer.encode(MARKER), tokenizer.encode(END)
        texts = ((i, tokenizer.decode([i])) for i in range(tokenizer.vocab_size))
        self.words = np.array([i for i, text in texts if _is_word(text)], np.int32)
        self.statement_length = len(self._marker) + KEY_TOKENS + VALUE_TOKENS + len(self._end)

    def fact(self, rng: np.random.Generator) -> Fact:
        return self.facts(1, rng)[0]

    def facts(self, count: int, rng: np.random.Generator) -> list[Fact]:
        """`count` facts; no word is said twice in all of them.

        Raises:
          ConfigError: the vocabulary has too few words.
        """
        size = KEY_TOKENS + VALUE_TOKENS
        require(
            count * size <= len(self.words),
            "facts",
            count,
            f"the tokenizer's {len(self.words)} words are too few for facts of {size} words each",
        )
        drawn = rng.choice(self.words, (count, size), replace=False).tolist()
        return [Fact(tuple(words[:KEY_TOKENS]), tuple(words[KEY_TOKENS:])) for words in drawn]

    def statement(self, fact: Fact) -> list[int]:
        """Ids that tell the fact, or ask for it and answer."""
        return [*self._marker, *fact.key, *fact.value, *self._end]

    def question(self, fact: Fact) -> tuple[list[int], list[int]]:
        """Ids that ask for the fact, up to the value; and the value."""
        return [*self._marker, *fact.key], list(fact.value)

    def insert(
        self,
        tokens: np.ndarray,
        facts: Sequence[Fact],
        rng: np.random.Generator,
        questions: Sequence[Fact] = (),
    ) -> Told:
        """Put statements of `facts` into `tokens` `[n]` at random places, and one for each of `questions` after its
        fact's, which must be among `facts`. The length stays: text is cut at the end.

        The distance of a question is log-uniform: near ones are what a model learns from first.
        """
        room = len(tokens) - self.statement_length * (len(facts) + len(questions))
        require(room >= 0, "tokens", len(tokens), "must have room for all facts and questions")
        told = rng.random(len(facts)) * (_TOLD_WITHIN if questions else 1)
        when = dict(zip(facts, told, strict=True))
        said = [(time, fact, False) for fact, time in when.items()]
        for fact in questions:
            said.append((when[fact] + (1 - when[fact]) * _NEAREST ** rng.random(), fact, True))

        parts, kinds, start = [], [], 0
        for time, fact, asked in sorted(said, key=lambda s: s[0]):
            stop = int(time * (room + 1))
            parts += [tokens[start:stop], self.statement(fact)]
            kinds += [np.full(stop - start, _TEXT), self._kinds(asked)]
            start = stop
        parts.append(tokens[start:room])
        kinds.append(np.full(room - start, _TEXT))
        kind = np.concatenate(kinds)
        return Told(np.concatenate(parts).astype(np.int32), kind != _CHANCE, kind == _ANSWER)

    def _kinds(self, asked: bool) -> np.ndarray:
        value = _ANSWER if asked else _CHANCE
        return np.repeat(
            [_CHANCE, value, _TEXT], [len(self._marker) + KEY_TOKENS, VALUE_TOKENS, len(self._end)]
        )

    def train_on(self, tokens: np.ndarray, facts: int, questions: int, rng: np.random.Generator) -> Told:
        """`tokens` with that many new facts, and that many questions each about a random one of them."""
        new = self.facts(facts, rng)
        return self.insert(tokens, new, rng, [new[i] for i in rng.integers(0, facts, questions)])


_TEXT, _CHANCE, _ANSWER = range(3)


def _is_word(text: str) -> bool:
    word = text.removeprefix(" ")
    return word != text and len(word) >= _LETTERS and word.isascii() and word.isalpha() and word.islower()


def skipped_positions(length: int, span: int, align: int, rng: np.random.Generator) -> np.ndarray:
    """Positions int32 `[length]`, growing, below `span`, with up to four skips at random multiples of `align`.

    Positional skip-wise training (arXiv:2309.10400): rope sees the distances of long text in a short one. Skips
    are multiples of `align`, too.
    """
    blocks = -(-length // align)
    free = span // align - blocks
    count = int(rng.integers(0, min(_MOST_SKIPS, blocks - 1) + 1))
    places = np.sort(rng.choice(np.arange(1, blocks), count, replace=False))
    skipped = np.concatenate([[0], np.sort(rng.integers(0, free + 1, count))])
    index = np.arange(length)
    return (index + align * skipped[np.searchsorted(places, index // align, side="right")]).astype(np.int32)
