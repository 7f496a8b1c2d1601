import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from mlaflax.config import ConfigError
from mlaflax.tokenizer import MIN_VOCAB_SIZE, StreamDecoder, Tokenizer

TEXTS = [
    "In the beginning God created the heaven and the earth.\n",
    "Pack my box with five dozen liquor jugs; the quick brown fox jumps over the lazy dog.\n",
    "Größe, naïve, 日本語, 👩‍👩‍👧, \u2028 and 100 numbers\n",
] * 5
TOKENIZER = Tokenizer.train(TEXTS, 320)


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_every_text_survives(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(0 <= i < TOKENIZER.vocab_size for i in ids)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60))
@settings(max_examples=300, deadline=None)
def test_stream_gives_the_whole_text_in_pieces(ids):
    decoder = StreamDecoder(TOKENIZER)
    pieces = [decoder.feed(i) for i in ids]
    assert "".join(pieces) + decoder.finish() == TOKENIZER.decode(ids)


@given(st.text(alphabet=st.characters(blacklist_characters="\ufffd", blacklist_categories=("Cs",))))
@settings(max_examples=200, deadline=None)
def test_stream_never_shows_half_a_character(text):
    decoder = StreamDecoder(TOKENIZER)
    shown = ""
    for token in TOKENIZER.encode(text):
        shown += decoder.feed(token)
        assert text.startswith(shown)
    assert shown == text and decoder.finish() == ""


def test_stream_holds_an_unfinished_character_until_the_end():
    decoder = StreamDecoder(TOKENIZER)
    head = TOKENIZER.encode("🙂")[:-1]
    assert [decoder.feed(i) for i in head] == [""] * len(head)
    assert decoder.finish() == "\ufffd"
    assert decoder.feed(TOKENIZER.encode("a")[0]) == "a"  # nothing carried over


def test_special_tokens_in_text_are_only_text():
    assert TOKENIZER.eos_id not in TOKENIZER.encode("a<|endoftext|>b")
    assert TOKENIZER.eos_id not in TOKENIZER.encode_batch(["a<|endoftext|>b"])[0]
    assert TOKENIZER.encode("<|endoftext|>", parse_special=True) == [TOKENIZER.eos_id]
    assert TOKENIZER.decode([TOKENIZER.eos_id]) == ""
    assert TOKENIZER.decode([TOKENIZER.eos_id], skip_special=False) == "<|endoftext|>"


def test_training_is_deterministic_and_of_the_size_asked_for():
    assert Tokenizer.train(iter(TEXTS), 320).fingerprint == TOKENIZER.fingerprint
    assert Tokenizer.train(TEXTS, 310).fingerprint != TOKENIZER.fingerprint
    assert TOKENIZER.vocab_size == 320
    assert len({TOKENIZER.eos_id, TOKENIZER.pad_id}) == 2


def test_bytes_alone_spell_everything():
    smallest = Tokenizer.train([], MIN_VOCAB_SIZE)
    assert smallest.vocab_size == MIN_VOCAB_SIZE
    assert len(smallest.encode("é🙂")) == 6
    assert smallest.decode(smallest.encode("é🙂")) == "é🙂"


def test_batch_equals_one_by_one():
    assert TOKENIZER.encode_batch(TEXTS) == [TOKENIZER.encode(t) for t in TEXTS]


def test_file_and_json_round_trip(tmp_path):
    file = tmp_path / "new" / "tokenizer.json"
    TOKENIZER.save(file)
    TOKENIZER.save(file)
    assert [p.name for p in file.parent.iterdir()] == ["tokenizer.json"]
    for again in (
        Tokenizer.load(file),
        Tokenizer.load(file.parent),
        Tokenizer.from_json(TOKENIZER.to_json()),
    ):
        assert again.fingerprint == TOKENIZER.fingerprint
        assert again.eos_id == TOKENIZER.eos_id
        assert again.encode(TEXTS[2]) == TOKENIZER.encode(TEXTS[2])


@pytest.mark.parametrize("eos", ["<|pad|>", {"content": "<|pad|>"}])
def test_configuration_beside_names_the_end_of_text(tmp_path, eos):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert Tokenizer.load(tmp_path).eos_id == TOKENIZER.pad_id


def test_misuse_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"vocab_size = 100: must be at least 258"):
        Tokenizer.train(TEXTS, 100)
    with pytest.raises(ConfigError, match=r"nowhere.*no such file"):
        Tokenizer.load(tmp_path / "nowhere")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json.*must be a Hugging Face tokenizer\.json"):
        Tokenizer.load(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="must be a Hugging Face"):
        Tokenizer.load(broken)
    with pytest.raises(ConfigError, match="not the JSON of a tokenizer"):
        Tokenizer.from_json("[]")
    with pytest.raises(ConfigError, match="has no end-of-text token"):
        Tokenizer(tokenizers.Tokenizer(models.BPE()))


def test_what_is_no_text_is_named():
    tokenizer = Tokenizer.train(["some text to learn from"] * 3, 270)
    with pytest.raises(ConfigError, match="must be Unicode text, without lone surrogates"):
        tokenizer.encode("a \ud800 b")
