"""Turn a GGUF file of a Llama, Qwen2 or Qwen3 model into a checkpoint, tokenizer and chat template included.

Quantised blocks are dequantised: weights are stored as float32, the very numbers that llama.cpp multiplies with.

python -m mlaflax.convert from-gguf model.gguf runs/model
"""

import dataclasses
import json
import time
from typing import Annotated

import tyro

from mlaflax.cli import Terminal
from mlaflax.convert.gguf import from_gguf


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to convert, and where to.

    Attributes:
      source: the file.
      out: checkpoint to make; must not exist, or be empty.
      json: print one JSON object on stdout in place of the summary.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    json: bool = False


def run(arguments: Arguments, terminal: Terminal) -> int:
    began = time.monotonic()
    with terminal.working(f"reading {arguments.source}"):
        parameters = from_gguf(arguments.source, arguments.out)
    summary = {
        "status": "done",
        "checkpoint": arguments.out,
        "parameters": parameters,
        "seconds": round(time.monotonic() - began, 2),
    }
    if arguments.json:
        print(json.dumps(summary), flush=True)
    else:
        print(f"{parameters:,} parameters, {summary['seconds']:.1f} s: {arguments.out}", flush=True)
    return 0
