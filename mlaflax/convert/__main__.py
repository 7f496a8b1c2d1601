"""python -m mlaflax.convert COMMAND ...

Models of other libraries, in and out. Each command explains itself with --help.

Exit status: 0 done; 1 it could not be done (a full disk); 2 the command line, the folder or the checkpoint is wrong;
130 or 143 stopped by Ctrl-C or SIGTERM. Unless the status is 0, nothing was written.
"""

import importlib
import json
import sys

from mlaflax.runtime import (
    interrupt_signal,
    leave_silently_when_interrupted,
    leave_stdout,
    raise_signals,
)

if __name__ == "__main__":
    leave_silently_when_interrupted()

from mlaflax.checkpoint import CheckpointError
from mlaflax.cli import CannotDo, Terminal, nearest, parse
from mlaflax.config import ConfigError

# A command is a module with a docstring, a frozen dataclass `Arguments` that has a field `json`, and
# `run(arguments, terminal) -> exit status`. It is imported only when it is called.
COMMANDS = {
    "from-hf": "a Hugging Face folder becomes a checkpoint: from-hf DIR OUT",
    "to-hf": "a checkpoint becomes a Hugging Face folder: to-hf CKPT DIR",
    "from-gguf": "a GGUF file becomes a checkpoint: from-gguf FILE OUT",
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
        module = importlib.import_module(f"mlaflax.convert.{name.replace('-', '_')}")
        parsed = parse(
            module.Arguments,
            flags,
            prog=f"python -m mlaflax.convert {name}",
            description=(module.__doc__ or "").strip(),
        )
        return module.run(parsed, terminal)
    except (ConfigError, CheckpointError) as error:
        return _failed(2, str(error), flags, terminal)
    except CannotDo as error:
        return _failed(1, str(error), flags, terminal)
    except BrokenPipeError:
        leave_stdout()  # the reader has left (`| head`)
        return 141
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        return _failed(1, f"{what}{(error.strerror or str(error)).lower()}", flags, terminal)
    except KeyboardInterrupt as error:
        stopped = interrupt_signal(error)
        return _failed(128 + stopped, f"stopped by {stopped.name}; nothing was written", flags, terminal)


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
