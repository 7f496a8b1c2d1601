"""The decode engine: prompts in, tokens out, through one jitted prefill and one jitted decode step."""

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from mlaflax.cache import LatentCache, PageAllocator
from mlaflax.cache.latent import default_page_size, pool_format
from mlaflax.config import CacheFormat, ConfigError, RopeFormat, require, require_cache_format, require_types
from mlaflax.decode import steps
from mlaflax.decode.sampling import Sampled, SamplingArrays, SamplingParams
from mlaflax.decode.text import TextAssembler
from mlaflax.formats import get_format
from mlaflax.model import Transformer
from mlaflax.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What the engine compiles for. Every field is a shape: prompts and sampling never recompile.

    Attributes:
      cache_format: number format of the cache, see `mlaflax.formats`.
      rope_format: how the cache keeps the rope key: `bf16`, or `fp8` with the formats that scale.
      max_sequences: slots, that is sequences that decode together. More prompts wait for a free slot.
      max_length: longest sequence, prompt and continuation, in tokens; None is the model's.
      cache_tokens: size of the page pool in tokens, shared by all slots; None gives every slot its full
        length. With less, prompts wait until enough pages are free.
      prefill_chunks: chunk lengths that prefill compiles for, see `cut`.
    """

    cache_format: CacheFormat = "bf16"
    max_sequences: int = 8
    max_length: int | None = None
    cache_tokens: int | None = None
    prefill_chunks: tuple[int, ...] = (32, 256, 1024)
    rope_format: RopeFormat = "bf16"

    def __post_init__(self):
        require_types(self)
        require_cache_format(self.cache_format, self.rope_format)
        for name in ("max_sequences", "cache_tokens"):
            value = getattr(self, name)
            require(value is None or value > 0, name, value, "must be greater than 0")
        require(
            self.max_length is None or self.max_length > 1,
            "max_length",
            self.max_length,
            "must be at least 2",
        )
        require(
            bool(self.prefill_chunks) and all(n > 0 for n in self.prefill_chunks),
            "prefill_chunks",
            self.prefill_chunks,
            "must hold at least one length, each greater than 0",
        )


def cut(length: int, chunks: Sequence[int]) -> list[int]:
    """Chunk lengths, some of `chunks`, that together hold a prompt of `length` tokens; the last is filled up.

    The longest first, and no chunk less than half full unless it is the shortest there is.
    """
    chunks, cuts = sorted(chunks), []
    while length > 0:
        fitting = [n for n in chunks if n <= 2 * length] or chunks[:1]
        # One that holds all the rest ends it; the shortest of these wastes least.
        cuts.append(next((n for n in fitting if n >= length), fitting[-1]))
        length -= cuts[-1]
    return cuts


class Event(NamedTuple):
    """One generated token.

    Attributes:
      index: which prompt it continues.
      token: its id.
      text: text that became certain with it; may be empty while a character or a possible stop string is
        incomplete. Empty throughout without a tokenizer.
      logprob: its log-probability under the model, before temperature and filters.
      top_logprobs: `(id, log-probability)` of the most probable tokens, as many as were asked for.
      finish_reason: `stop` (end of text or a stop string) or `length` with the last token, else None.
      time: `time.perf_counter()` when it reached the host.
    """

    index: int
    token: int
    text: str
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    finish_reason: str | None
    time: float


@dataclasses.dataclass
class Completion:
    """The continuation of one prompt.

    Attributes:
      tokens: generated ids, the end-of-text token included if it ended there.
      text: their text, without the stop string that ended it; empty without a tokenizer.
      logprobs, top_logprobs: per token, see `Event`.
      finish_reason: `stop` or `length`.
      time_to_first_token: seconds from the start of the call, waiting for a slot included.
      token_times: seconds from the start of the call to each token.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    token_times: list[float] = dataclasses.field(default_factory=list)

    @property
    def time_to_first_token(self) -> float:
        return self.token_times[0] if self.token_times else float("nan")


@dataclasses.dataclass
class _Request:
    index: int
    prompt: list[int]
    sampling: SamplingParams
    assembler: TextAssembler | None
    pages: list[int] = dataclasses.field(default_factory=list)
    produced: int = 0


class Engine:
    """Generates with a latent cache.

        engine = Engine(model, tokenizer, EngineConfig(cache_format="fp8"))
        for completion in engine.generate(["Once upon a time", "The"], SamplingParams(max_tokens=64)):
            print(completion.text)

    Prefill is compiled once per chunk length, decode once; `warm_up` does it ahead. The step that follows
    is dispatched before the last one's tokens are looked at, so the host's work hides behind the device's.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer | None = None, config: EngineConfig | None = None
    ):
        config = config or EngineConfig()
        limit = model.config.max_length
        max_length = config.max_length or limit
        require(max_length <= limit, "max_length", max_length, f"must not exceed the model's {limit}")
        self.config = dataclasses.replace(config, max_length=max_length)
        self.tokenizer = tokenizer
        self.vocab_size = model.config.vocab_size
        self._eos = -1 if tokenizer is None else tokenizer.eos_id
        # A scan copies each layer's weights before it uses them, which doubles a small step's memory
        # traffic on CPU; on accelerators programs of constant size matter more.
        serving = model.unstacked() if jax.default_backend() == "cpu" else model
        self._graph, self._weights = nnx.split(serving)

        self._page_size = default_page_size(model.config, config.cache_format)
        per_slot = -(-max_length // self._page_size)
        pool_tokens = config.cache_tokens or config.max_sequences * per_slot * self._page_size
        self._pages = PageAllocator(-(-pool_tokens // self._page_size))
        needs_codebook = get_format(pool_format(model.config, config.cache_format)).codebook
        self._cache_shape = {
            "format": config.cache_format,
            "num_sequences": config.max_sequences,
            "max_length": max_length,
            "num_pages": self._pages.num_pages,
            "rope_format": config.rope_format,
            "codebook": model.codebooks() if needs_codebook else None,
        }
        self._model_config = model.config
        self._state = self._empty_state()
        self._generating = False
        self._admit = jax.jit(steps.admit, donate_argnames="state")
        self._release = jax.jit(steps.release, donate_argnames="state")
        self._prefill = jax.jit(steps.prefill, static_argnames=("graph", "eos"), donate_argnames="state")
        self._decode = jax.jit(steps.decode, static_argnames=("graph", "eos"), donate_argnames="state")

    def _empty_state(self) -> steps.EngineState:
        cache = LatentCache.create(self._model_config, **self._cache_shape)
        # Where the weights are: a state that is not bound to a device until the first step returns it would
        # compile every program a second time.
        return jax.device_put(steps.EngineState.create(cache), _replicated(self._weights))

    @property
    def cache(self) -> LatentCache:
        """The cache as it stands; the next step replaces it."""
        return self._state.cache

    @property
    def state(self) -> steps.EngineState:
        """Everything on the device, as it stands; the next step replaces it."""
        return self._state

    def decode_step(self, state: steps.EngineState) -> tuple[steps.EngineState, Sampled]:
        """The compiled decode step on a state of the caller's, which it consumes."""
        return self._decode(self._graph, self._weights, state, self._eos)

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return self._pages.num_free

    def compile_decode(self) -> jax.stages.Compiled:
        """The compiled decode step, for looking at its memory and its HLO."""
        return self._decode.lower(self._graph, self._weights, self._state, self._eos).compile()

    def warm_up(self) -> None:
        """Compile everything now rather than with the first prompt."""
        longest = self.config.max_length
        assert longest is not None
        for chunk in self.config.prefill_chunks:
            length = min(chunk, longest - 1, self._pages.num_pages * self._page_size - 1)
            if length > 0:
                self.generate([[0] * length], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Continue every prompt; see `stream` for arguments and errors."""
        start = time.perf_counter()
        completions = [Completion() for _ in prompts]
        for event in self.stream(prompts, sampling):
            completion = completions[event.index]
            completion.tokens.append(event.token)
            completion.text += event.text
            completion.logprobs.append(event.logprob)
            completion.top_logprobs.append(event.top_logprobs)
            completion.token_times.append(event.time - start)
            completion.finish_reason = event.finish_reason
        return completions

    def stream(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[Event]:
        """Continue every prompt, yielding each token as it comes; prompts' tokens interleave.

        Leaving the iterator early frees its slots. One stream at a time: a second one is refused while the
        first is neither finished nor closed.

        Args:
          prompts: texts (with a tokenizer) or lists of token ids, of any lengths.
          sampling: one for all, or one per prompt; default `SamplingParams()`.

        Raises:
          ConfigError: an empty prompt, one that does not fit the cache with at least one token to come, or
            ids outside the vocabulary. Raised before any work.
        """
        requests = self._requests(prompts, sampling)
        return self._run(requests)

    def _requests(self, prompts, sampling) -> list[_Request]:
        require(not isinstance(prompts, str), "prompts", prompts, "must be a list of prompts")
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        require(
            len(sampling) == len(prompts),
            "sampling",
            len(sampling),
            f"must be one per prompt ({len(prompts)})",
        )
        return [self._request(i, p, s) for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))]

    def _request(self, index: int, prompt: Prompt, sampling: SamplingParams) -> _Request:
        name = f"prompts[{index}]"
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ConfigError(
                    f"{name} = {prompt!r}: is text, but the engine has no tokenizer; pass token ids"
                )
            ids = self.tokenizer.encode(prompt)
        else:
            if isinstance(prompt, np.ndarray | jax.Array):
                prompt = np.asarray(prompt).tolist()
            require(isinstance(prompt, Sequence), name, prompt, "must be text or a list of token ids")
            bad = next((t for t in prompt if not isinstance(t, int | np.integer)), None)
            require(bad is None, name, bad, "is not a token id: ids are whole numbers")
            ids = [int(token) for token in prompt]
        require(bool(ids), name, prompt, "is empty; a prompt needs at least one token")
        bad = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        require(bad is None, name, bad, f"is not a token id; the vocabulary has {self.vocab_size}")
        assert self.config.max_length is not None
        room = min(self.config.max_length, self._pages.num_pages * self._page_size)
        require(
            len(ids) < room,
            name,
            f"{len(ids)} tokens",
            f"must be shorter than the cache's {room} tokens per sequence",
        )
        # The last token is never written, so a sequence may be one token longer than its pages.
        most = room - len(ids) + 1
        if sampling.max_tokens > most:
            sampling = dataclasses.replace(sampling, max_tokens=most)
        if sampling.stop and self.tokenizer is None:
            raise ConfigError(f"stop = {sampling.stop!r}: stop strings need a tokenizer")
        assembler = None if self.tokenizer is None else TextAssembler(self.tokenizer, sampling.stop)
        return _Request(index, ids, sampling, assembler)

    def _run(self, requests: list[_Request]) -> Iterator[Event]:
        if self._generating:
            raise RuntimeError("the engine is already generating: finish or close its other stream first")
        waiting = collections.deque(requests)
        slots: list[_Request | None] = [None] * self.config.max_sequences
        pending: tuple[Sampled, list[_Request | None]] | None = None
        try:
            self._generating = True
            while waiting or pending or any(slots):
                while waiting and None in slots and self._fits(waiting[0]):
                    slot = slots.index(None)
                    slots[slot] = request = waiting.popleft()
                    sampled = jax.device_get(self._start(slot, request))
                    yield self._event(request, sampled, 0, slots, slot)
                # Dispatch the next step before looking at the last one's tokens.
                following = None
                if any(request is not None for request in slots):
                    self._state, sampled = self.decode_step(self._state)
                    following = (sampled, list(slots))
                if pending is not None:
                    yield from self._events(*pending, slots)
                pending = following if any(slots) else None
        finally:
            self._generating = False
            # The pages first: what follows can be interrupted, too.
            left = {slot: request for slot, request in enumerate(slots) if request is not None}
            for request in left.values():
                self._pages.release(request.pages)
            if any(array.is_deleted() for array in jax.tree.leaves(self._state)):
                # An exception, Ctrl-C perhaps, came between a step, which consumed the state, and its result.
                self._state = self._empty_state()
            else:
                for slot in left:
                    self._state = self._release(self._state, np.int32(slot))

    def _fits(self, request: _Request) -> bool:
        return self._pages.num_free >= self._pages_for(request)

    def _pages_for(self, request: _Request) -> int:
        return -(-(len(request.prompt) + request.sampling.max_tokens - 1) // self._page_size)

    def _start(self, slot: int, request: _Request) -> Sampled:
        """Prefill a request into a free slot; returns the sample after its last chunk."""
        request.pages = self._pages.allocate(self._pages_for(request))
        table = np.full(self._state.cache.block_table.shape[1], -1, np.int32)
        table[: len(request.pages)] = request.pages
        sampling = request.sampling
        self._state = self._admit(
            self._state,
            np.int32(slot),
            table,
            np.int32(sampling.max_tokens),
            SamplingArrays.stack([sampling]),
            np.bool_(not sampling.ignore_eos and self._eos >= 0),
        )
        sampled, begin = None, 0
        for size in cut(len(request.prompt), self.config.prefill_chunks):
            count = min(size, len(request.prompt) - begin)
            tokens = np.zeros(size, np.int32)
            tokens[:count] = request.prompt[begin : begin + count]
            begin += count
            self._state, sampled = self._prefill(
                self._graph, self._weights, self._state, np.int32(slot), tokens, np.int32(count),
                np.bool_(begin == len(request.prompt)), self._eos,
            )  # fmt: skip
        assert sampled is not None
        return sampled

    def _events(self, sampled: Sampled, at_dispatch: list[_Request | None], slots: list) -> Iterator[Event]:
        sampled = jax.device_get(sampled)
        for slot, request in enumerate(at_dispatch):
            # A request that ended with the step before was still in its slot when this one was dispatched.
            if request is not None and slots[slot] is request:
                yield self._event(request, sampled, slot, slots, slot)

    def _event(self, request: _Request, sampled: Sampled, row: int, slots: list, slot: int) -> Event:
        now = time.perf_counter()
        sampling = request.sampling
        token = int(sampled.token[row])
        request.produced += 1
        text, reason = "", None
        at_eos = not sampling.ignore_eos and token == self._eos
        if request.assembler is not None and not at_eos:
            text, stopped = request.assembler.push(token)
            reason = "stop" if stopped else None
        if at_eos:
            reason = "stop"
        elif reason is None and request.produced >= sampling.max_tokens:
            reason = "length"
        if reason is not None:
            if request.assembler is not None:
                text += request.assembler.finish()
            self._finish(slot, slots)
        asked = sampling.logprobs
        top = tuple(
            (int(i), float(p))
            for i, p in zip(sampled.top_ids[row, :asked], sampled.top_logprobs[row, :asked], strict=True)
            if i >= 0
        )
        return Event(request.index, token, text, float(sampled.logprob[row]), top, reason, now)

    def _finish(self, slot: int, slots: list) -> None:
        self._pages.release(slots[slot].pages)
        slots[slot] = None
        self._state = self._release(self._state, np.int32(slot))


def _replicated(weights: nnx.State) -> jax.sharding.Sharding:
    """The sharding of an array that every device of the weights holds whole."""
    sharding = jax.tree.leaves(weights)[0].sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return sharding
