"""python -m train CONFIG [--field value]"""

import json
import sys

from mlaflax.runtime import keep_freed_memory, leave_silently_when_interrupted

if __name__ == "__main__":
    leave_silently_when_interrupted()
keep_freed_memory()

from mlaflax.checkpoint import CheckpointError  # noqa: E402 - after the allocator is set up
from mlaflax.config import ConfigError  # noqa: E402
from mlaflax.runtime import (  # noqa: E402
    interrupt_signal,
    leave_stdout,
    raise_signals,
    use_compilation_cache,
)
from train.cli import parse  # noqa: E402
from train.loop import TrainingError, train  # noqa: E402
from train.terminal import Terminal  # noqa: E402


def main(arguments: list[str]) -> int:
    terminal = Terminal()
    if sys.stdout is None:
        leave_stdout()
    raise_signals()
    summary = {}
    as_json = "--json" in arguments
    try:
        parsed = parse(arguments)
        as_json = parsed.json
        if parsed.config.compilation_cache:
            use_compilation_cache()
        summary = train(parsed.config, terminal)
        status = {"finished": 0, "target reached": 0, "target missed": 1}.get(summary["status"])
        return_code = 128 + summary["signal"] if status is None else status
    except ConfigError as error:
        return_code, summary = 2, {"status": "error", "error": str(error)}
    except (CheckpointError, TrainingError) as error:
        return_code, summary = 1, {"status": "error", "error": str(error)}
    except BrokenPipeError:
        leave_stdout()
        return 141
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        return_code, summary = (
            1,
            {"status": "error", "error": f"{what}{(error.strerror or str(error)).lower()}"},
        )
    except KeyboardInterrupt as error:
        stopped = interrupt_signal(error)
        sentence = f"stopped by {stopped.name} before the first step"
        return_code, summary = 128 + stopped, {"status": f"stopped by {stopped.name}", "error": sentence}
    if "error" in summary:
        terminal.say(f"error: {summary['error']}")
    if as_json:
        try:
            print(json.dumps(summary), flush=True)
        except OSError as error:
            # The run itself is over and saved: its status stands unless the answer was wanted and lost.
            leave_stdout()
            if not isinstance(error, BrokenPipeError):
                terminal.say(
                    f"error: cannot write to standard output: {(error.strerror or str(error)).lower()}"
                )
                return_code = return_code or 1
    return return_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
