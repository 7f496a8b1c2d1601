"""What the cache's rounding costs this model, format by format.

    ppl       perplexity of held-out text, beside the bf16 cache of the same weights
    needle    facts hidden in long text, asked for later
    fidelity  error of each layer's attention, and where attention goes
    speed     decoding, tokens per second

Text is what the run held out (config.json says what it trained on), or other text with --text or --corpus.

python -m infer evaluate --checkpoint runs/latent_qat --report report

python -m infer evaluate --checkpoint runs/demo --suites ppl --formats fp8 --formats mixed:window=256,salient=0
"""

import dataclasses
import json
import pathlib
import sys
import typing
from typing import Annotated, Any, Literal, NamedTuple

import tyro
from rich.console import Console

from infer.evaluation import fidelity, needle, ppl, report, speed
from infer.evaluation.text import Rows, Text, held_out_text, rows_of
from infer.evaluation.variants import Variant, far_from, parse_variant, parse_variants
from mlaflax.checkpoint import (
    CheckpointError,
    Checkpoints,
    Loaded,
    load_model,
    read_model_config,
    read_tokenizer,
)
from mlaflax.cli import Terminal, nearest
from mlaflax.config import ConfigError, ModelConfig, require, require_positive
from mlaflax.runtime import interrupt_signal
from mlaflax.tokenizer import Tokenizer
from train.data import CORPORA
from train.data.needle import NeedleTask

_Repeated = tyro.conf.UseAppendAction[tuple[str, ...]]
Suite = Literal["ppl", "needle", "fidelity", "speed"]
LENGTHS = (1024, 2048, 4096, 8192, 16384)
SPEED_CONTEXT = 4096
SUITES: tuple[str, ...] = typing.get_args(Suite)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to measure, on what.

    Attributes:
      checkpoint: directory of a training run.
      suites: a measurement; repeat the flag for several.
      formats: a cache to compare: f32, bf16, fp8, int8, fp4, nuq4, mixed, or one of these with fields of its own, as
        mixed:cold=nuq4,window=256 or fp4:rope=fp8; repeatable. bf16, which all are compared with, is always there.
      text: file of text that the model has not seen, in place of what its run held out; repeatable.
      corpus: named text that the run did not train on, in place of what it held out: stdlib (Python source) or any
        other that `python -m train --help` names.
      context: tokens in a row of text.
      max_rows: rows to read; 0 for all there are.
      max_documents: documents to take rows from; 0 for all.
      lengths: tokens of a text with needles, question included; repeatable. Those beyond the model's are left out.
      depths: places for a needle in a text, evenly spread.
      trials: texts of each length.
      speed_context: tokens in the cache while decoding is timed; default 4096, or as many as the model takes.
      report: directory for report.md, report.json and plots.
      seed: of the choice of rows, and of needles.
      step: training step of the checkpoint.
      json: print one JSON object on stdout in place of the table.
    """

    checkpoint: str
    suites: Annotated[
        _Repeated, tyro.conf.arg(metavar="|".join(SUITES), help_behavior_hint="(repeatable; default: all)")
    ] = ()
    formats: Annotated[
        _Repeated,
        tyro.conf.arg(metavar="NAME[:FIELD=VALUE,...]", help_behavior_hint="(repeatable; default: all)"),
    ] = ()
    text: Annotated[_Repeated, tyro.conf.arg(metavar="FILE", help_behavior_hint="(repeatable)")] = ()
    corpus: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    context: int = 2048
    max_rows: int = 32
    max_documents: int = 0
    lengths: Annotated[
        tyro.conf.UseAppendAction[tuple[int, ...]],
        tyro.conf.arg(
            metavar="INT", help_behavior_hint=f"(repeatable; default: {' '.join(map(str, LENGTHS))})"
        ),
    ] = ()
    depths: int = 10
    trials: int = 4
    speed_context: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 4096, or the model's)")
    ] = None
    report: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    seed: int = 0
    step: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the newest)")] = (
        None
    )
    json: bool = False

    def __post_init__(self):
        require(bool(self.checkpoint), "checkpoint", self.checkpoint, "must name a directory")
        for name in self.suites:
            if name not in SUITES:
                raise ConfigError(f"suites = {name!r}: no such suite; {nearest(name, SUITES)}")
        for name in self.text:
            require(bool(name) and "\0" not in name, "text", name, "must name a file")
        if self.corpus is not None and self.corpus not in CORPORA:
            raise ConfigError(
                f"corpus = {self.corpus!r}: no such corpus; {nearest(self.corpus, list(CORPORA))}"
            )
        require_positive(self, "", "context", "depths", "trials")
        for length in self.lengths:
            require(length > 0, "lengths", length, "must be greater than 0")
        for name in ("max_rows", "max_documents", "seed"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "must be 0 or more")
        require(self.report is None or bool(self.report), "report", self.report, "must name a directory")


def run(arguments: Arguments, terminal: Terminal) -> int:
    with Checkpoints(arguments.checkpoint, read_only=True) as checkpoints:
        checkpoints.require_step(arguments.step)  # before anything slow
    config = read_model_config(arguments.checkpoint)
    variants = parse_variants(arguments.formats, config)
    suites = [s for s in SUITES if s in (arguments.suites or SUITES)]
    check(arguments, suites, variants, config)
    tokenizer = read_tokenizer(arguments.checkpoint)
    if tokenizer is None:
        raise CheckpointError(
            f"{arguments.checkpoint} holds no tokenizer.json, so text means nothing to its model"
        )
    if suites == ["speed"]:
        text = Text("none", [])  # decoding is timed on whatever is in the cache
    else:
        text = held_out_text(arguments.checkpoint, tokenizer, arguments.text, arguments.corpus, terminal.say)
    material = gather(arguments, suites, config, tokenizer, text)
    with terminal.working(f"loading {arguments.checkpoint}"):
        loaded = load_model(arguments.checkpoint, arguments.step)

    result: dict[str, Any] = {
        "status": "finished",
        "checkpoint": arguments.checkpoint,
        "step": loaded.step,
        "text": text.source,
        "arguments": dataclasses.asdict(arguments),
        "variants": {
            v.name: {
                "cache_format": v.cache_format,
                "rope_format": v.rope_format,
                "mixed": dataclasses.asdict(v.mixed) if v.tiered else None,
                "bytes_per_token": v.bytes_per_token(config, arguments.context),
            }
            for v in variants
        },
    }
    interrupted = None
    try:
        for suite in suites:
            result[suite] = _SUITES[suite](arguments, loaded, variants, material, terminal)
    except KeyboardInterrupt as error:
        interrupted = interrupt_signal(error)
        result["status"] = "interrupted"
    if arguments.report:
        written = report.write(pathlib.Path(arguments.report), result)
        terminal.say(f"wrote {', '.join(map(str, written))}")
    if arguments.json:
        print(json.dumps(report.plain(result), ensure_ascii=False), flush=True)
    else:
        # Wide enough for the tables where there is no terminal to tell.
        console = Console(width=None if sys.stdout.isatty() else 120)
        for table in report.tables(result):
            console.print(table.rendered())
    if interrupted:
        terminal.say(f"stopped by {interrupted.name}")
    return 128 + interrupted if interrupted else 0


def check(arguments: Arguments, suites: list[str], variants: list[Variant], config: ModelConfig) -> None:
    """What can be told to be wrong from the configuration alone.

    Raises:
      ConfigError: a length that does not fit the model or the variants.
    """
    limit = config.max_length
    require(
        arguments.context <= limit,
        "context",
        arguments.context,
        f"must not exceed model.max_length ({limit})",
    )
    if "speed" in suites:
        context = arguments.speed_context or limit
        require(
            speed.TOKENS < context <= limit,
            "speed_context",
            context,
            f"must be above {speed.TOKENS} and not exceed model.max_length ({limit})",
        )
    if "needle" in suites:
        needle_lengths(arguments, config)
    if "ppl" in suites or "fidelity" in suites:
        far_from(variants, arguments.context)


class Material(NamedTuple):
    """What the suites read; None where none of them does."""

    rows: Rows | None
    task: NeedleTask | None
    stacks: dict[int, list[needle.Haystack]]


def gather(
    arguments: Arguments, suites: list[str], config: ModelConfig, tokenizer: Tokenizer, text: Text
) -> Material:
    """Rows and texts with needles.

    Raises:
      ConfigError: the text is too short, or the tokenizer has too few words.
    """
    rows = task = None
    stacks = {}
    if "ppl" in suites or "fidelity" in suites:
        rows = rows_of(
            text,
            arguments.context,
            max_rows=arguments.max_rows,
            max_documents=arguments.max_documents,
            seed=arguments.seed,
        )
    if "needle" in suites:
        task = NeedleTask(tokenizer)
        lengths = needle_lengths(arguments, config)
        stacks = needle.haystacks(task, text, lengths, arguments.depths, arguments.trials, arguments.seed)
    return Material(rows, task, stacks)


def needle_lengths(arguments: Arguments, config: ModelConfig) -> list[int]:
    """The lengths asked for, those beyond the model's own left out; by default the model's own if no other fits.

    Raises:
      ConfigError: none is left.
    """
    asked = arguments.lengths or LENGTHS
    fitting = [n for n in dict.fromkeys(sorted(asked)) if n <= config.max_length]
    if not fitting and not arguments.lengths:
        return [config.max_length]
    require(bool(fitting), "lengths", min(asked), f"must not exceed model.max_length ({config.max_length})")
    return fitting


def _ppl(
    arguments: Arguments, loaded: Loaded, variants: list[Variant], material: Material, terminal: Terminal
) -> dict[str, Any]:
    rows = material.rows
    assert rows is not None
    with terminal.progress("perplexity", ppl.steps(rows, variants)) as advance:
        return ppl.measure(loaded.model, variants, rows, advance=advance)


def _needle(
    arguments: Arguments, loaded: Loaded, variants: list[Variant], material: Material, terminal: Terminal
) -> dict[str, Any]:
    assert material.task is not None
    longest = max(material.stacks)
    readers = {v.name: needle.CacheReader(loaded.model, v, longest) for v in variants if v.served}
    with terminal.progress("needles", needle.steps(material.stacks, len(readers))) as advance:
        return needle.measure(readers, material.task, material.stacks, advance)


def _fidelity(
    arguments: Arguments, loaded: Loaded, variants: list[Variant], material: Material, terminal: Terminal
) -> dict[str, Any]:
    rows = material.rows
    assert rows is not None
    with terminal.progress("fidelity", fidelity.steps(loaded.model, rows)) as advance:
        return fidelity.measure(loaded.model, variants, rows, advance)


def _speed(
    arguments: Arguments, loaded: Loaded, variants: list[Variant], material: Material, terminal: Terminal
) -> dict[str, Any]:
    context = arguments.speed_context or min(SPEED_CONTEXT, loaded.config.max_length)
    timed = [v for v in variants if v.served]
    if "f32" not in (v.name for v in timed):
        timed.insert(0, parse_variant("f32", loaded.config))
    with terminal.progress("speed", speed.steps(timed)) as advance:
        return speed.measure(loaded.model, timed, context, advance)


_SUITES = {"ppl": _ppl, "needle": _needle, "fidelity": _fidelity, "speed": _speed}
