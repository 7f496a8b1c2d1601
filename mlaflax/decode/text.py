"""The text of one request as its tokens come: whole characters, and nothing of a stop string."""

from collections.abc import Sequence
from typing import NamedTuple

from mlaflax.tokenizer import Tokenizer


class Piece(NamedTuple):
    """The text that one token makes certain, and whether a stop string was completed: it comes no more."""

    text: str
    stopped: bool


class StopStrings:
    """Passes text through until the first stop string, holding back what may yet become one.

    The stop string that is *complete* first ends the text, the longest where several are; so the outcome
    depends on the text alone and not on how it was cut into pieces.
    """

    def __init__(self, stop: Sequence[str]):
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is now certain to come before any stop string. Nothing more once one was found."""
        if self.found is not None:
            return ""
        text = self._held + text
        ends = [(at + len(s), -len(s), s) for s in self._stop if (at := text.find(s)) >= 0]
        if ends:
            end, _, self.found = min(ends)
            self._held = ""
            return text[: end - len(self.found)]
        certain = len(text) - self._undecided(text)
        self._held = text[certain:]
        return text[:certain]

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(s.startswith(text[-length:]) for s in self._stop):
                return length
        return 0

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


class TextAssembler:
    """One request's text, token by token.

        assembler = TextAssembler(tokenizer, stop=("END",))
        piece = assembler.push(token)   # for each token but the end-of-text one
        rest = assembler.finish()       # when the request ends for another reason than a stop string

    The pieces, joined, are the decoded text of all tokens up to the first stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._decoder = tokenizer.stream()
        self._stops = StopStrings(stop)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.found

    def push(self, token: int) -> Piece:
        text = self._stops.push(self._decoder.feed(token))
        return Piece(text, self._stops.found is not None)

    def finish(self) -> str:
        """What was held back: the beginning of a stop string that did not come, U+FFFD for half a character."""
        if self._stops.found is not None:
            return ""
        return self._stops.push(self._decoder.finish()) + self._stops.finish()
