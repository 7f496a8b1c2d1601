"""Models of other libraries in and out.

    python -m mlaflax.convert from-hf DIR OUT      a Hugging Face folder to a checkpoint of this library
    python -m mlaflax.convert to-hf CHECKPOINT OUT a checkpoint to a folder that transformers loads
    python -m mlaflax.convert from-gguf FILE OUT   a GGUF file to a checkpoint of this library

A checkpoint is what `python -m train` writes and `python -m infer` opens. OUT must not exist; it appears whole or not
at all.

Exit status: 0 done; 1 it could not be written; 2 the command line, the folder, the file or the checkpoint is wrong;
130 or 143 stopped by Ctrl-C or SIGTERM, with nothing written.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from mlaflax.runtime import (
    interrupt_signal,
    keep_freed_memory,
    leave_silently_when_interrupted,
    raise_signals,
)

if __name__ == "__main__":
    leave_silently_when_interrupted()
keep_freed_memory()

_INTERVAL = 5.0  # seconds between lines of progress


def main(arguments: Sequence[str] | None = None) -> int:
    raise_signals()
    parsed = _parser().parse_args(arguments)
    start = time.monotonic()

    from mlaflax.checkpoint import CheckpointError
    from mlaflax.config import ConfigError
    from mlaflax.convert.write import leftovers, require_absent

    try:
        require_absent(parsed.out)
        for path in leftovers(parsed.out):
            print(f"{path} was left by a conversion that was cut short: delete it", file=sys.stderr)
        said = _COMMANDS[parsed.command](parsed)
    except ConfigError as error:
        return _failed(2, str(error), parsed.json)
    except CheckpointError as error:
        return _failed(2 if "OUT = " in str(error) else 1, str(error), parsed.json)
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        return _failed(1, f"{what}{(error.strerror or str(error)).lower()}", parsed.json)
    except KeyboardInterrupt as error:
        stopped = interrupt_signal(error)
        return _failed(128 + stopped, f"stopped by {stopped.name}; nothing was written", parsed.json)
    said |= {"status": "finished", "out": parsed.out, "seconds": round(time.monotonic() - start, 1)}
    said["bytes"] = sum(f.stat().st_size for f in pathlib.Path(parsed.out).rglob("*") if f.is_file())
    if parsed.json:
        print(json.dumps(said))
    else:
        print(f"wrote         {said['out']}: {said['bytes']:,} bytes in {said['seconds']} s")
        print(f"parameters    {said['parameters']:,}")
        if said["left_out"]:
            shown = ", ".join(said["left_out"][:3])
            more = len(said["left_out"]) - 3
            print(f"left out      {shown}{f' and {more} more' if more > 0 else ''}")
        print(f"next          {said['next']}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mlaflax.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    ours = commands.add_parser(
        "from-hf",
        help="a Hugging Face folder to a checkpoint",
        description="DeepSeek V2, V3, R1 and models of their layout; Llama, Mistral, Qwen2, Qwen3. config.json "
        "decides. Weights become float32; FP8 weights are multiplied with the scales of their blocks. Prediction "
        "modules (multi-token prediction) are left out and named.",
    )
    ours.add_argument("source", metavar="DIR", help="folder with config.json and safetensors files")
    theirs = commands.add_parser(
        "to-hf",
        help="a checkpoint to a Hugging Face folder",
        description="The folder loads with AutoModelForCausalLM.from_pretrained.",
    )
    theirs.add_argument("source", metavar="CHECKPOINT", help="directory of a training run or an import")
    theirs.add_argument("--step", type=int, help="step to export (default: the newest)")
    theirs.add_argument(
        "--dtype",
        default="float32",
        help="of the weights: float32 or bfloat16, which is exact for what came from bfloat16 (default: float32)",
    )
    theirs.add_argument(
        "--shard-bytes", type=int, default=5 << 30, help="largest weight file in bytes (default: 5 GiB)"
    )
    gguf = commands.add_parser(
        "from-gguf",
        help="a GGUF file to a checkpoint",
        description="Llama, Qwen2 and Qwen3 models; quantised blocks are dequantised to float32.",
    )
    gguf.add_argument("source", metavar="FILE", help="GGUF file")
    for command in (ours, theirs, gguf):
        command.add_argument("out", metavar="OUT", help="directory to write; must not exist")
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _from_hf(parsed: argparse.Namespace) -> dict[str, Any]:
    from mlaflax.convert.hf import Import, write_import

    source = Import(parsed.source)
    progress = _Progress("tensors read", source.steps)
    found = write_import(source, parsed.out, advance=progress)
    return {**found._asdict(), "next": _generate(parsed.out)}


def _to_hf(parsed: argparse.Namespace) -> dict[str, Any]:
    from mlaflax.convert.hf import to_hf

    progress = _Progress("tensors written")
    found = to_hf(
        parsed.source,
        parsed.out,
        step=parsed.step,
        dtype=parsed.dtype,
        shard_bytes=parsed.shard_bytes,
        advance=progress,
    )
    return {**found._asdict(), "next": f'AutoModelForCausalLM.from_pretrained("{parsed.out}")'}


def _from_gguf(parsed: argparse.Namespace) -> dict[str, Any]:
    from mlaflax.convert.gguf import from_gguf

    parameters = from_gguf(parsed.source, parsed.out)
    return {"parameters": parameters, "left_out": [], "next": _generate(parsed.out)}


def _generate(out: str) -> str:
    return f'python -m infer generate --checkpoint {out} --prompt "..."'


_COMMANDS = {"from-hf": _from_hf, "to-hf": _to_hf, "from-gguf": _from_gguf}


class _Progress:
    """A line on stderr every few seconds."""

    def __init__(self, what: str, total: int | None = None):
        self._what, self._total, self._count, self._last = what, total, 0, time.monotonic()

    def __call__(self, _: str, total: int | None = None) -> None:
        self._count += 1
        if time.monotonic() - self._last >= _INTERVAL:
            self._last = time.monotonic()
            print(f"{self._what}: {self._count:,} of {total or self._total:,}", file=sys.stderr)


def _failed(status: int, sentence: str, as_json: bool) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    if as_json:
        print(json.dumps({"status": "error", "error": sentence}))
    return status


if __name__ == "__main__":
    sys.exit(main())
