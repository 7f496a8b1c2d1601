import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaflax.decode.text import StopStrings, TextAssembler
from mlaflax.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(
        ["the cat sat on the mat, and the dog — naïve — ate 東京 🙂 END of it. " * 20], 400
    )


def run(assembler, tokens):
    """Text pieces until a stop string, then the rest, as the engine goes about it; and the tokens used."""
    pieces = []
    for token in tokens:
        piece = assembler.push(token)
        pieces.append(piece.text)
        if piece.stopped:
            break
    return [*pieces, assembler.finish()], len(pieces)


def by_characters(text, stop):
    """Reads one character at a time: the first stop string to be complete ends the text."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 30)),
)
@settings(max_examples=500)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text, stop, cuts):
    expected, found = by_characters(text, stop)
    edges = sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    stops = StopStrings(stop)
    emitted = ""
    for a, b in itertools.pairwise(edges):
        emitted += stops.push(text[a:b])
        assert expected.startswith(emitted)  # what is out is never taken back
    emitted += stops.finish()
    assert (emitted, stops.found is not None) == (expected, found)


@given(
    text=st.text("abc", max_size=20),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_is_held_back_only_while_it_may_become_a_stop_string(text, stop):
    stops = StopStrings(stop)
    emitted = "".join(map(stops.push, text))
    if stops.found is None:
        held = text[len(emitted) :]
        assert not held or any(s.startswith(held) and s != held for s in stop)


def test_pieces_join_to_the_decoded_text(tokenizer):
    whole = "the naïve dog — 東京 🙂 — ate the cat 🙂🙂"
    tokens = tokenizer.encode(whole)
    pieces, used = run(TextAssembler(tokenizer), tokens)
    assert "".join(pieces) == whole
    assert all("\ufffd" not in piece for piece in pieces)
    assert used == len(tokens)


def test_stop_string_across_tokens_is_cut_out(tokenizer):
    # One token or more per character, so that no token ends beyond the stop string.
    tokens = [i for character in "the cat END of" for i in tokenizer.encode(character)]
    assembler = TextAssembler(tokenizer, ("END",))
    pieces, used = run(assembler, tokens)
    assert "".join(pieces) == "the cat "
    assert assembler.stop == "END"
    assert used == len("the cat END")


def test_a_stop_string_that_does_not_come_is_released_at_the_end(tokenizer):
    assembler = TextAssembler(tokenizer, ("END of it",))
    pieces, _ = run(assembler, tokenizer.encode("the cat END"))
    assert "".join(pieces) == "the cat END"
    assert pieces[-1].endswith("END") and "END" not in "".join(pieces[:-1])
    assert assembler.stop is None


def test_half_a_character_is_flushed_as_a_replacement(tokenizer):
    tokens = [tokenizer.encode(chr(0x1F980))[i] for i in range(2)]  # two of a crab's four bytes
    pieces, _ = run(TextAssembler(tokenizer), tokens)
    assert pieces[:2] == ["", ""]
    assert pieces[-1] == tokenizer.decode(tokens)
    assert "\ufffd" in pieces[-1]


def test_nothing_follows_a_stop_string(tokenizer):
    assembler = TextAssembler(tokenizer, ("cat",))
    assert run(assembler, tokenizer.encode("the cat sat"))[0][-1] == ""
    assert assembler.push(tokenizer.encode(" sat")[0]) == ("", True)
    assert assembler.finish() == ""
