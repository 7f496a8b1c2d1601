"""Text to token ids and back: train, load and save byte-level BPE tokenizers.

A thin layer over Hugging Face `tokenizers`, so that every `tokenizer.json` works.
"""

import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from mlaflax.config import ConfigError, require

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
_SPECIALS = (END_OF_TEXT, PAD)
# The byte alphabet and the specials: below this a byte-level tokenizer could not spell every text.
MIN_VOCAB_SIZE = 256 + len(_SPECIALS)

# How published tokenizers name the end of a text; the first that exists is used.
_EOS_NAMES = (
    END_OF_TEXT,
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "<|eot_id|>",
)


class Tokenizer:
    """Byte-level BPE, or any other model a `tokenizer.json` holds.

    Text never turns into special tokens by accident: `encode` treats "<|endoftext|>" inside a text as
    those thirteen characters unless told otherwise, and adds no special tokens of its own.

    Attributes:
      eos_id: id of the end-of-text token.
      eos_token: its name.
      pad_id: id of the padding token, or none.
      vocab_size: the highest id plus one: what a model's vocabulary must hold.
      fingerprint: sha256 of the JSON, in hex: equal for tokenizers that encode equally.
    """

    def __init__(self, inner: tokenizers.Tokenizer, eos_token: str | None = None):
        names = (eos_token,) if eos_token else _EOS_NAMES
        eos_id = next((i for i in map(inner.token_to_id, names) if i is not None), None)
        require(
            eos_id is not None, "tokenizer", eos_token, f"has no end-of-text token, one of {', '.join(names)}"
        )
        self._inner = inner
        self._json = inner.to_str()
        # A second copy, because whether special tokens are parsed is state of the inner object.
        self._plain = tokenizers.Tokenizer.from_str(self._json)
        self._plain.encode_special_tokens = True
        self.eos_id: int = eos_id  # pyright: ignore[reportAttributeAccessIssue]
        self.eos_token: str = inner.id_to_token(self.eos_id)  # pyright: ignore[reportAttributeAccessIssue]
        self.pad_id: int | None = inner.token_to_id(PAD)
        self.vocab_size: int = 1 + max(inner.get_vocab(with_added_tokens=True).values())
        self.fingerprint: str = hashlib.sha256(self._json.encode()).hexdigest()

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train a byte-level BPE of at most `vocab_size` entries; the same documents give the same one.

        Fewer entries come out when the documents hold too few distinct pairs.

        Raises:
          ConfigError: if `vocab_size` cannot hold the 256 bytes and the special tokens.
        """
        require(
            vocab_size >= MIN_VOCAB_SIZE,
            "vocab_size",
            vocab_size,
            f"must be at least {MIN_VOCAB_SIZE}: 256 bytes and {len(_SPECIALS)} special tokens",
        )
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
        inner.decoder = decoders.ByteLevel()  # pyright: ignore
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(_SPECIALS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(documents, trainer)
        return cls(inner)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Read a `tokenizer.json`, or the one in a directory.

        A tokenizer_config.json beside it names the end-of-text token.

        Raises:
          ConfigError: if the file is missing, is no tokenizer, or has no end-of-text token.
        """
        file = pathlib.Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        require(file.is_file(), "tokenizer", str(path), "no such file; it must be a tokenizer.json")
        try:
            inner = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the Rust side raises bare Exception
            raise ConfigError(
                f"tokenizer = {str(file)!r}: must be a Hugging Face tokenizer.json ({error})"
            ) from None
        return cls(inner, _configured_eos(file.with_name("tokenizer_config.json")))

    @classmethod
    def from_json(cls, text: str, eos_token: str | None = None) -> "Tokenizer":
        """The tokenizer that `to_json` wrote."""
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:
            raise ConfigError(f"tokenizer: the text is not the JSON of a tokenizer ({error})") from None
        return cls(inner, eos_token)

    def to_json(self) -> str:
        return self._json

    def save(self, path: str | os.PathLike) -> None:
        """Write a tokenizer.json; readers see the old file or the whole new one, never a part."""
        file = pathlib.Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(self._json)
            os.chmod(beside, 0o644)  # mkstemp's 0600 would hide the file from other users
            os.replace(beside, file)
        except BaseException:
            os.unlink(beside)
            raise

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Token ids of `text`; `parse_special` turns the names of special tokens in it into their ids.

        Raises:
          ConfigError: the text holds a lone surrogate, which is no character (Python makes them of bytes that
            are not UTF-8).
        """
        require(is_unicode(text), "text", text, "must be Unicode text, without lone surrogates")
        inner = self._inner if parse_special else self._plain
        return inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        return [e.ids for e in self._plain.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids beyond the vocabulary nothing."""
        return self._inner.decode(list(ids), skip_special_tokens=skip_special)

    def stream(self) -> "StreamDecoder":
        return StreamDecoder(self)


def is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class StreamDecoder:
    """Turns token ids into text as they come, a character only once all its bytes are there.

    The pieces, joined, equal `Tokenizer.decode` of all ids.
    """

    # Enough context for decoders that treat the first token of a text differently (leading space).
    _CONTEXT = 4

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._emitted = 0  # characters of the window's text that are out

    def feed(self, token: int) -> str:
        """The text that `token` completes: often a word, possibly empty."""
        self._window.append(int(token))
        text = self._tokenizer.decode(self._window)
        # UTF-8 that stops short decodes to one U+FFFD at the very end: it may yet become a character.
        complete = len(text) - text.endswith("\ufffd")
        piece = text[self._emitted : complete]
        self._emitted = max(self._emitted, complete)
        if complete == len(text) and len(self._window) > 2 * self._CONTEXT:
            self._window = self._window[-self._CONTEXT :]
            self._emitted = len(self._tokenizer.decode(self._window))
        return piece

    def finish(self) -> str:
        """What is left: U+FFFD for a character whose bytes never came, mostly nothing.

        The decoder is then ready for the next text.
        """
        rest = self._tokenizer.decode(self._window)[self._emitted :]
        self._window, self._emitted = [], 0
        return rest


def _configured_eos(file: pathlib.Path) -> str | None:
    if not file.is_file():
        return None
    try:
        token = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"tokenizer_config = {str(file)!r}: must be a JSON object ({error})") from None
    return token.get("content") if isinstance(token, dict) else token
