"""Documents as token ids in one memory-mapped file, made once per text and tokenizer."""

import dataclasses
import hashlib
import json
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mlaflax.config import require
from mlaflax.tokenizer import Tokenizer
from train.data import cache
from train.data.documents import Document

_FORMAT = "1"
# Characters handed to the tokenizer at a time: enough for all cores, little enough to hold in memory.
_BLOCK = 4_000_000


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """Token ids of documents, end to end, each closed by the end-of-text token.

    Attributes:
      tokens: uint16 (uint32 when the vocabulary needs it) `[n]`, mapped from disk.
      offsets: int64 `[documents + 1]`; document i is `tokens[offsets[i]:offsets[i + 1]]`.
      text_bytes: UTF-8 bytes of the text, for bits per byte.
      fingerprint: hex digest of the text and the tokenizer.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    text_bytes: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))


def tokenize(documents: Sequence[Document], tokenizer: Tokenizer, root: pathlib.Path) -> TokenFile:
    """Token ids of `documents`, from the cache under `root` or made and put there."""
    digest = hashlib.sha256(f"{_FORMAT} {tokenizer.fingerprint} {tokenizer.eos_id}".encode())
    for document in documents:
        digest.update(document.digest)
    fingerprint = digest.hexdigest()
    directory = root / "tokens" / fingerprint[:32]
    found = _open(directory, fingerprint)
    if found is None:
        shutil.rmtree(directory, ignore_errors=True)
        with cache.filling(directory) as beside:
            _write(documents, tokenizer, beside)
        found = _open(directory, fingerprint)
        require(found is not None, "data.cache_dir", str(root), "holds token files that cannot be read")
        assert found is not None
    return found


def _open(directory: pathlib.Path, fingerprint: str) -> TokenFile | None:
    """The token file in `directory`, or none if it is not there or was damaged, as by a full or failing disk."""
    try:
        about = json.loads((directory / "about.json").read_text())
        offsets = np.load(directory / "offsets.npy")
        tokens = np.memmap(directory / "tokens.bin", dtype=about["dtype"], mode="r")
        whole = len(tokens) == offsets[-1]
    except (OSError, EOFError, ValueError, KeyError, IndexError):
        return None
    return TokenFile(tokens, offsets, about["text_bytes"], fingerprint) if whole else None


def _write(documents: Sequence[Document], tokenizer: Tokenizer, directory: pathlib.Path) -> None:
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    lengths, text_bytes = [], 0
    with (directory / "tokens.bin").open("wb") as out:
        for block in _blocks(documents):
            text_bytes += sum(len(text.encode()) for text in block)
            for ids in tokenizer.encode_batch(block):
                out.write(np.array([*ids, tokenizer.eos_id], dtype).tobytes())
                lengths.append(len(ids) + 1)
    np.save(directory / "offsets.npy", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    (directory / "about.json").write_text(json.dumps({"dtype": dtype, "text_bytes": text_bytes}))


def _blocks(documents: Iterable[Document]) -> Iterator[list[str]]:
    block, size = [], 0
    for document in documents:
        block.append(document.text)
        size += len(document.text)
        if size >= _BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def trained_tokenizer(documents: Sequence[Document], vocab_size: int, root: pathlib.Path) -> Tokenizer:
    """A tokenizer trained on `documents`, from the cache under `root` or made and put there."""
    digest = hashlib.sha256(f"{_FORMAT} {vocab_size}".encode())
    for document in documents:
        digest.update(document.digest)
    directory = root / "tokenizers" / digest.hexdigest()[:32]
    if not directory.is_dir():
        tokenizer = Tokenizer.train((d.text for d in documents), vocab_size)
        with cache.filling(directory) as beside:
            tokenizer.save(beside / "tokenizer.json")
    return Tokenizer.load(directory)
