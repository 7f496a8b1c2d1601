"""Documents, and which of them are held out."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

from mlaflax.config import require

# Parts of a cut work are no shorter: a held-out text of a few words would measure nothing.
_SMALLEST_PART = 1000


@dataclasses.dataclass(frozen=True)
class Document:
    """One text and the name it came under."""

    name: str
    text: str

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).digest()


@dataclasses.dataclass(frozen=True)
class Documents:
    """Text to train on and text kept apart, never sharing a document."""

    train: list[Document]
    held_out: list[Document]


def unique(documents: Iterable[Document]) -> Iterable[Document]:
    """Drop repeated texts: a copy of a held-out document must not be trained on."""
    seen = set()
    for document in documents:
        if document.digest not in seen:
            seen.add(document.digest)
            yield document


def hold_out(documents: Sequence[Document], fraction: float) -> Documents:
    """Split by document, close to `fraction` of the characters and never above it.

    The choice follows the hash of the text alone, so it is the same on every machine and for every seed,
    order and name. A document larger than the whole held-out part, such as a book in one file, is first cut
    at its blank lines into parts, each a document of its own.

    Raises:
      ConfigError: if the text is too short to have both parts.
    """
    budget = int(fraction * sum(len(d.text) for d in documents))
    parts = [
        p for d in documents for p in cut(d, max(budget, _SMALLEST_PART), max(budget // 2, _SMALLEST_PART))
    ]
    held, room = set(), budget
    for document in sorted(parts, key=lambda d: d.digest):
        if len(document.text) <= room:
            held.add(document)
            room -= len(document.text)
    train = [d for d in parts if d not in held]
    require(
        bool(held and train),
        "data.held_out_fraction",
        fraction,
        f"cannot be met by {len(parts)} documents of {sum(len(d.text) for d in parts)} characters: "
        "give more text or another fraction",
    )
    return Documents(train, [d for d in parts if d in held])


def cut(document: Document, longest: int, size: int) -> list[Document]:
    """Cut a text longer than `longest` into parts of at most `size` characters that join to it again.

    Cuts fall after a blank line where there is one in the latter half of a part, else after a line, a
    word, or anywhere. Parts are named "name#1", "name#2", ...
    """
    text = document.text
    if len(text) <= longest:
        return [document]
    parts, start = [], 0
    while start < len(text):
        stop = start + size
        if stop < len(text):
            for mark in ("\n\n", "\n", " "):
                at = text.rfind(mark, start + size // 2, stop)
                if at >= 0 and at + len(mark) <= stop:
                    stop = at + len(mark)
                    break
        parts.append(text[start:stop])
        start = stop
    return [Document(f"{document.name}#{i}", part) for i, part in enumerate(parts, 1)]
