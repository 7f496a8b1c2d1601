"""The text of one request as its tokens come: whole characters, stop strings, and why it ended."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from mlaflax.decode.sampling import SamplingParams

FinishReason = Literal["stop", "length"]


class Decoder(Protocol):
    """Token ids to text, piece by piece; `mlaflax.tokenizer.StreamDecoder` is one."""

    def feed(self, token: int, /) -> str: ...

    def finish(self) -> str: ...


class Piece(NamedTuple):
    """What one token adds to a request: text that is certain, and the reason if the request has ended."""

    text: str
    finish_reason: FinishReason | None


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


class RequestText:
    """Assembles one request's text and decides when the request ends.

    Attributes:
      text: all text emitted so far.
      tokens: ids pushed so far, the one that ended the request included.
      finish_reason: `stop` (end of text, or a stop string), `length` (`max_tokens`, or `cut`), or None
        while it runs.
      stop: the stop string that ended the request, if one did.
    """

    def __init__(
        self, decoder: Decoder | None, sampling: SamplingParams, eos_ids: Sequence[int] | int | None = ()
    ):
        """
        Args:
          decoder: fresh, for this request alone. Without one there is no text and no stop string is found.
          sampling: its `stop`, `max_tokens` and `ignore_eos` are what counts here.
          eos_ids: tokens that end the text; their own text is not emitted.
        """
        self._decoder = decoder
        self._max_tokens = sampling.max_tokens
        self._stops = StopStrings(sampling.stop)
        eos = () if eos_ids is None else (eos_ids,) if isinstance(eos_ids, int) else eos_ids
        self._eos_ids = frozenset() if sampling.ignore_eos else frozenset(eos)
        self.text = ""
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None

    @property
    def stop(self) -> str | None:
        return self._stops.found

    def push(self, token: int) -> Piece:
        """Take the next token. Tokens after the end are ignored, so that a step in flight does no harm."""
        if self.finish_reason:
            return Piece("", self.finish_reason)
        self.tokens.append(token)
        if token in self._eos_ids:
            return self._end("stop")
        text = self._stops.push(self._decoder.feed(token)) if self._decoder else ""
        if self._stops.found is not None:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self._max_tokens:
            return self._end("length", text)
        self.text += text
        return Piece(text, self.finish_reason)

    def cut(self) -> Piece:
        """End the request with `length` where it stands: the context is full, or the reader has left."""
        return Piece("", self.finish_reason) if self.finish_reason else self._end("length")

    def _end(self, reason: FinishReason, text: str = "") -> Piece:
        if self._decoder:
            # The last bytes may complete a stop string; whatever else was held back is text after all.
            text += self._stops.push(self._decoder.finish())
            text += self._stops.finish()
        self.finish_reason = "stop" if self._stops.found is not None else reason
        self.text += text
        return Piece(text, self.finish_reason)
