"""python -m infer COMMAND [--flag value]

Use a trained model. Each command explains itself with --help.

Exit status: 0 done; 1 it could not be done; 2 the command line, the prompt or the checkpoint is wrong;
130 or 143 stopped by Ctrl-C or SIGTERM, with what there was until then.
"""

import importlib
import json
import os
import sys

from mlaflax.runtime import keep_freed_memory, leave_silently_when_interrupted

if __name__ == "__main__":
    leave_silently_when_interrupted()
keep_freed_memory()

from mlaflax.checkpoint import CheckpointError  # noqa: E402
from mlaflax.cli import Terminal, nearest, parse  # noqa: E402 - after the allocator is set up
from mlaflax.config import ConfigError  # noqa: E402
from mlaflax.runtime import (  # noqa: E402
    interrupt_signal,
    leave_stdout,
    raise_signals,
    use_compilation_cache,
)

# A command is a module with a docstring, a frozen dataclass `Arguments` that has a field `json`, and
# `run(arguments, terminal) -> exit status`. It is imported only when it is called.
COMMANDS = {
    "generate": "continue prompts with text",
    "evaluate": "what the cache's rounding costs: perplexity, needles, fidelity, speed",
    "calibrate": "fit the codebooks of the format nuq4 to the model's latents",
    "table": "bytes of this model's cache in every format, beside MHA and GQA of its shape",
}


def usage() -> str:
    return f"{(__doc__ or '').strip()}\n\nCommands:\n" + "\n".join(
        f"    {name:10} {what}" for name, what in COMMANDS.items()
    )


def main(arguments: list[str]) -> int:
    terminal = Terminal()
    if sys.stdout is None:
        leave_stdout()
    raise_signals()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    name, *flags = arguments
    try:
        if name not in COMMANDS:
            raise ConfigError(f"COMMAND = {name!r}: no such command; {nearest(name, list(COMMANDS))}")
        module = importlib.import_module(f"infer.{name}")
        parsed = parse(
            module.Arguments,
            flags,
            prog=f"python -m infer {name}",
            description=(module.__doc__ or "").strip(),
        )
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            use_compilation_cache()
        return module.run(parsed, terminal)
    except (ConfigError, CheckpointError) as error:
        return _failed(2, str(error), flags, terminal)
    except BrokenPipeError:
        leave_stdout()  # the reader has left (`| head`)
        return 141
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        return _failed(1, f"{what}{(error.strerror or str(error)).lower()}", flags, terminal)
    except KeyboardInterrupt as error:
        stopped = interrupt_signal(error)
        return _failed(128 + stopped, f"stopped by {stopped.name} before the first token", flags, terminal)


def _failed(status: int, sentence: str, flags: list[str], terminal: Terminal) -> int:
    terminal.say(f"error: {sentence}")
    if "--json" in flags:
        try:
            print(json.dumps({"status": "error", "error": sentence}), flush=True)
        except OSError:
            leave_stdout()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
