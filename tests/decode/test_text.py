import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaflax.decode.sampling import SamplingParams
from mlaflax.decode.text import RequestText, StopStrings
from mlaflax.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(
        ["the cat sat on the mat, and the dog — naïve — ate 東京 🙂 END of it. " * 20], 400
    )


def request(tokenizer, **fields):
    fields = {"max_tokens": 10_000, **fields}
    return RequestText(tokenizer.stream(), SamplingParams(**fields), tokenizer.eos_id)


def run(text, tokens):
    pieces = []
    for token in tokens:
        piece = text.push(token)
        pieces.append(piece.text)
        if piece.finish_reason:
            break
    return pieces


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
    text = request(tokenizer)
    pieces = run(text, tokens)
    assert "".join(pieces) + text.cut().text == whole == text.text
    assert all("\ufffd" not in piece for piece in pieces)
    assert text.tokens == tokens


def test_end_of_text_stops_and_is_not_emitted(tokenizer):
    text = request(tokenizer)
    run(text, [*tokenizer.encode("the cat"), tokenizer.eos_id, *tokenizer.encode(" sat")])
    assert (text.text, text.finish_reason, text.stop) == ("the cat", "stop", None)
    assert text.tokens[-1] == tokenizer.eos_id


def test_end_of_text_can_be_ignored(tokenizer):
    text = request(tokenizer, ignore_eos=True)
    run(text, [*tokenizer.encode("the cat"), tokenizer.eos_id, *tokenizer.encode(" sat")])
    assert text.text + text.cut().text == "the cat sat"
    assert text.finish_reason == "length"


def test_stop_string_across_tokens_is_cut_out(tokenizer):
    tokens = [i for character in "the cat END of" for i in tokenizer.encode(character)]
    text = request(tokenizer, stop=("END",))
    run(text, tokens)
    assert (text.text, text.finish_reason, text.stop) == ("the cat ", "stop", "END")
    # The character tokens of the text up to and with the D.
    assert len(text.tokens) == len("the cat END")


def test_the_beginning_of_a_stop_string_is_released_at_the_end(tokenizer):
    for last, reason in (([], "length"), ([tokenizer.eos_id], "stop")):
        text = request(tokenizer, stop=("END of it",))
        pieces = run(text, [*tokenizer.encode("the cat END"), *last])
        assert "END" not in "".join(pieces[: len(pieces) - len(last)])
        text.cut()
        assert (text.text, text.finish_reason, text.stop) == ("the cat END", reason, None)


def test_max_tokens_ends_with_length_and_flushes_incomplete_characters(tokenizer):
    tokens = [tokenizer.encode(chr(0x1F980))[i] for i in range(2)]  # two of a crab's four bytes
    text = request(tokenizer, max_tokens=2)
    pieces = run(text, [*tokens, *tokens])
    assert pieces[0] == ""
    assert text.finish_reason == "length"
    assert text.text == "".join(pieces) == tokenizer.decode(tokens)
    assert "\ufffd" in text.text


def test_a_stop_string_in_the_last_token_counts_as_stop(tokenizer):
    tokens = tokenizer.encode("the cat END")
    text = request(tokenizer, max_tokens=len(tokens), stop=("END",))
    run(text, tokens)
    assert (text.text, text.finish_reason) == ("the cat ", "stop")


def test_tokens_after_the_end_change_nothing(tokenizer):
    text = request(tokenizer, max_tokens=1)
    first = text.push(tokenizer.encode("the")[0])
    assert first.finish_reason == "length"
    assert text.push(tokenizer.eos_id) == ("", "length")
    assert text.cut() == ("", "length")
    assert len(text.tokens) == 1


def test_without_a_tokenizer_only_ids_count():
    text = RequestText(None, SamplingParams(max_tokens=5), (7, 8))
    assert [text.push(i).finish_reason for i in (1, 2, 8)] == [None, None, "stop"]
    assert text.text == ""
