"""Continue prompts with text.

The text goes to stdout as it comes: alone for one prompt, prompt by prompt as each is complete for
several. Timings and the size of the cache follow on stderr.

python -m infer generate --checkpoint runs/demo --prompt "In the beginning"

python -m infer generate --checkpoint runs/demo --prompt "And he said" --prompt "The" --cache fp8 --json
"""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, get_args

import numpy as np
import tyro

from mlaflax.cache import LatentCache
from mlaflax.checkpoint import CheckpointError, Checkpoints, load_model, read_model_config, read_tokenizer
from mlaflax.cli import Terminal
from mlaflax.config import (
    SCALED_FORMATS,
    CacheFormat,
    ModelConfig,
    RopeFormat,
    require,
    require_choice,
    require_positive,
)
from mlaflax.decode import Completion, Engine, EngineConfig, SamplingParams, cut
from mlaflax.runtime import interrupt_signal
from mlaflax.tokenizer import Tokenizer, is_unicode

_TRAINED = "(default: the one it was trained for)"
_Repeated = tyro.conf.UseAppendAction[tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to continue, and how.

    Attributes:
      checkpoint: directory of a training run.
      prompt: text to continue; repeat the flag for a batch. Write --prompt=TEXT if it begins with a dash.
      prompt_file: file whose whole text is a prompt, without its last newline; - reads stdin.
      cache: number format of the cache.
      rope: number format of the cache's rope key; fp8 beside all formats but f32 and bf16.
      max_tokens: tokens to generate for each prompt.
      temperature: 0 takes the most probable token.
      top_k: keep the k most probable tokens; 0 keeps all.
      top_p: keep the most probable tokens that together hold this much mass.
      min_p: keep tokens with at least this share of the best one's probability.
      seed: of the draws; every prompt uses it, alone or in a batch.
      stop: text before which to stop; repeatable.
      ignore_eos: go on past the end-of-text token.
      logprobs: report each token's log-probability and this many alternatives.
      max_length: longest sequence in tokens, prompt included.
      max_sequences: prompts decoded together; the others wait.
      step: training step of the checkpoint.
      json: print one JSON object on stdout in place of the text.
    """

    checkpoint: str
    prompt: _Repeated = ()
    prompt_file: _Repeated = ()
    cache: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="|".join(get_args(CacheFormat)),
            help_behavior_hint=_TRAINED,
        ),
    ] = None
    rope: Annotated[
        str | None,
        tyro.conf.arg(metavar="|".join(get_args(RopeFormat)), help_behavior_hint=_TRAINED),
    ] = None
    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: _Repeated = ()
    ignore_eos: bool = False
    logprobs: int = 0
    max_length: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: as needed, up to the model's)")
    ] = None
    max_sequences: int = 8
    step: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the newest)")] = (
        None
    )
    json: bool = False

    def __post_init__(self):
        self.sampling()
        if self.cache is not None:
            require_choice("cache", self.cache, CacheFormat)
        if self.rope is not None:
            require_choice("rope", self.rope, RopeFormat)
        require(bool(self.checkpoint), "checkpoint", self.checkpoint, "must name a directory")
        require_positive(self, "", "max_sequences")
        require(
            self.max_length is None or self.max_length > 1,
            "max_length",
            self.max_length,
            "must be at least 2",
        )

    def sampling(self) -> SamplingParams:
        names = {field.name for field in dataclasses.fields(SamplingParams)}
        return SamplingParams(**{k: v for k, v in dataclasses.asdict(self).items() if k in names})


def run(arguments: Arguments, terminal: Terminal) -> int:
    prompts = read_prompts(arguments)
    with Checkpoints(arguments.checkpoint, read_only=True) as checkpoints:
        checkpoints.require_step(arguments.step)  # before anything slow
    config = read_model_config(arguments.checkpoint)
    tokenizer = read_tokenizer(arguments.checkpoint)
    if tokenizer is None:
        raise CheckpointError(
            f"{arguments.checkpoint} holds no tokenizer.json, so text means nothing to its model"
        )
    require(
        tokenizer.vocab_size <= config.vocab_size,
        "vocab_size",
        config.vocab_size,
        f"of {arguments.checkpoint}/config.json is below the {tokenizer.vocab_size} entries of its tokenizer",
    )
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    engine_config = fit_engine(arguments, config, list(map(len, ids)))

    with terminal.working(f"loading {arguments.checkpoint}"):
        loaded = load_model(arguments.checkpoint, arguments.step)
    began = time.perf_counter()
    with terminal.working("compiling"):
        engine = Engine(loaded.model, tokenizer, engine_config)
        engine.warm_up()
    compiled = time.perf_counter() - began

    printer = _Silent() if arguments.json else _Alone() if len(prompts) == 1 else _Labelled(prompts)
    results = [Completion() for _ in prompts]
    start = time.perf_counter()
    stream = engine.stream(ids, arguments.sampling())
    interrupted = None
    try:
        for event in stream:
            result = results[event.index]
            result.tokens.append(event.token)
            result.text += event.text
            result.logprobs.append(event.logprob)
            result.top_logprobs.append(event.top_logprobs)
            result.token_times.append(event.time - start)
            result.finish_reason = event.finish_reason
            printer.show(event.index, event.text, result)
    except KeyboardInterrupt as error:
        interrupted = interrupt_signal(error)
    printer.close(results)

    figures = {
        "compile_seconds": round(compiled, 3),
        **latency([result.token_times for result in results]),
        "cache": cache_figures(engine.cache),
    }
    if arguments.json:
        report = {
            "status": "interrupted" if interrupted else "finished",
            "checkpoint": arguments.checkpoint,
            "step": loaded.step,
            "completions": [
                _as_json(prompt, tokens, result, tokenizer, arguments.logprobs)
                for prompt, tokens, result in zip(prompts, ids, results, strict=True)
            ],
            **figures,
        }
        print(json.dumps(report, ensure_ascii=False), flush=True)
    elif arguments.logprobs:
        _print_logprobs(results, tokenizer)
    if interrupted:
        terminal.say(f"stopped by {interrupted.name}")
    terminal.say(_summary(ids, results, figures))
    return 128 + interrupted if interrupted else 0


def read_prompts(arguments: Arguments) -> list[str]:
    """All prompts, those of the command line first.

    Raises:
      ConfigError: there is none, one is empty, or a file is no UTF-8 text.
      OSError: a file cannot be read.
    """
    named = [(f"prompt {i + 1}", text) for i, text in enumerate(arguments.prompt)]
    for name in arguments.prompt_file:
        require(bool(name) and "\0" not in name, "prompt_file", name, "must name a file")
        data = sys.stdin.buffer.read() if name == "-" else pathlib.Path(name).read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            require(False, "prompt_file", name, f"must be UTF-8 text (byte {error.start} is not)")
            raise
        named.append((f"prompt_file {name}", text.removesuffix("\n")))
    require(bool(named), "prompt", None, "must be given at least once, or --prompt-file")
    for name, text in named:
        require(bool(text), name, text, "must not be empty")
        require(is_unicode(text), name, text, "must be UTF-8 text")
    return [text for _, text in named]


def fit_engine(arguments: Arguments, config: ModelConfig, lengths: Sequence[int]) -> EngineConfig:
    """An engine just large enough for prompts of these lengths, in tokens.

    Raises:
      ConfigError: a prompt leaves no room for a single token.
    """
    limit = arguments.max_length or config.max_length
    require(
        limit <= config.max_length,
        "max_length",
        limit,
        f"must not exceed the model's {config.max_length} tokens",
    )
    for i, length in enumerate(lengths):
        name, rule = f"prompt {i + 1}", f"must be shorter than the {limit} tokens that the cache holds"
        require(length < limit, name, f"{length} tokens", rule)
    cache_format = arguments.cache or config.cache_format
    trained = config.rope_format if cache_format in SCALED_FORMATS else "bf16"
    # A power of two, so that runs that differ a little share a compiled program.
    needed = max(lengths) + arguments.max_tokens
    return EngineConfig(
        cache_format=cache_format,  # pyright: ignore[reportArgumentType]
        rope_format=arguments.rope or trained,  # pyright: ignore[reportArgumentType]
        max_sequences=min(len(lengths), arguments.max_sequences),
        max_length=arguments.max_length or min(limit, max(256, 1 << (needed - 1).bit_length())),
        prefill_chunks=tuple({n for length in lengths for n in cut(length, EngineConfig.prefill_chunks)}),
    )


def latency(token_times: Sequence[Sequence[float]]) -> dict[str, float | int | None]:
    """Timings of sequences whose tokens came at these seconds after the start; None where nothing came.

    Time to first token is the median over sequences and counts the wait for a slot; inter-token latency is
    over all gaps inside sequences; tokens per second are all tokens by the time of the last one.
    """
    firsts = [times[0] for times in token_times if times]
    gaps = [gap for times in token_times for gap in np.diff(times)]
    count = sum(map(len, token_times))
    return {
        "tokens": count,
        "ttft_seconds": _rounded(np.median(firsts)) if firsts else None,
        "inter_token_seconds_median": _rounded(np.median(gaps)) if gaps else None,
        "inter_token_seconds_p95": _rounded(np.percentile(gaps, 95)) if gaps else None,
        "tokens_per_second": _rounded(count / max(times[-1] for times in token_times if times))
        if count
        else None,
    }


def cache_figures(cache: LatentCache) -> dict[str, Any]:
    tokens = cache.pages_per_layer * cache.page_size
    return {
        "format": cache.format_name,
        "rope_format": cache.rope_format,
        "bytes_allocated": cache.nbytes(),
        "tokens": tokens,
        "bytes_per_token": sum(part.nbytes for part in cache.pool.values()) / tokens,
    }


def _rounded(value: Any) -> float:
    return float(f"{float(value):.6g}")


class _Silent:
    def show(self, index: int, text: str, result: Completion) -> None: ...

    def close(self, results: list[Completion]) -> None: ...


class _Alone(_Silent):
    """One continuation, as it comes."""

    def show(self, index, text, result):
        sys.stdout.write(text)
        sys.stdout.flush()

    def close(self, results):
        sys.stdout.write("\n")
        sys.stdout.flush()


class _Labelled(_Silent):
    """Each continuation under its prompt when it is complete: their tokens come interleaved."""

    def __init__(self, prompts: list[str]):
        self._prompts = prompts
        self._shown: set[int] = set()

    def show(self, index, text, result):
        if result.finish_reason:
            self._block(index, result)

    def close(self, results):
        for index, result in enumerate(results):
            if index not in self._shown:
                self._block(index, result)

    def _block(self, index: int, result: Completion) -> None:
        self._shown.add(index)
        prompt = self._prompts[index]
        head = prompt if len(prompt) <= 60 else prompt[:57] + "..."
        print(
            f"[{index + 1}] {head!r} ({len(result.tokens)} tokens, {result.finish_reason or 'interrupted'})"
        )
        print(result.text, flush=True)


def _as_json(
    prompt: str, ids: list[int], result: Completion, tokenizer: Tokenizer, logprobs: int
) -> dict[str, Any]:
    values = {
        "prompt": prompt,
        "prompt_tokens": len(ids),
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "ttft_seconds": _rounded(result.token_times[0]) if result.token_times else None,
    }
    if logprobs:
        values["logprobs"] = [
            {
                "id": token,
                "token": _name(token, tokenizer),
                "logprob": _rounded(logprob),
                "top": [{"id": i, "token": _name(i, tokenizer), "logprob": _rounded(p)} for i, p in top],
            }
            for token, logprob, top in zip(result.tokens, result.logprobs, result.top_logprobs, strict=True)
        ]
    return values


def _name(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token], skip_special=False)


def _print_logprobs(results: list[Completion], tokenizer: Tokenizer) -> None:
    for index, result in enumerate(results):
        print(f"\nlog-probabilities [{index + 1}]")
        for token, logprob, top in zip(result.tokens, result.logprobs, result.top_logprobs, strict=True):
            alternatives = "  ".join(f"{_name(i, tokenizer)!r} {p:.3f}" for i, p in top)
            print(f"{logprob:9.3f}  {_name(token, tokenizer)!r:16} {alternatives}")


def _summary(ids: list[list[int]], results: list[Completion], figures: dict[str, Any]) -> str:
    def milliseconds(name: str) -> str:
        value = figures[name]
        return "-" if value is None else f"{1000 * value:,.1f} ms"

    cache, rate = figures["cache"], figures["tokens_per_second"]
    reasons = [result.finish_reason or "interrupted" for result in results]
    ended = (
        ", ".join(f"{reasons.count(r)} {r}" for r in dict.fromkeys(reasons))
        if len(reasons) > 1
        else reasons[0]
    )
    return "\n".join(
        [
            f"tokens       {sum(map(len, ids))} read, {figures['tokens']} generated (ended by: {ended})",
            f"first token  {milliseconds('ttft_seconds')} (compiled before, in {figures['compile_seconds']:.1f} s)",
            f"then each    {milliseconds('inter_token_seconds_median')} median, "
            f"{milliseconds('inter_token_seconds_p95')} p95",
            f"throughput   {'-' if rate is None else f'{rate:,.1f}'} tokens/s",
            f"cache        {cache['format']}, {cache['bytes_allocated']:,} bytes allocated for {cache['tokens']:,} "
            f"tokens, {cache['bytes_per_token']:,.0f} bytes per token",
        ]
    )
