"""The command line: a configuration by name or path, and any field of it by flag."""

import contextlib
import dataclasses
import difflib
import importlib.util
import io
import pathlib
import sys
from typing import Annotated

import tyro

from mlaflax.config import ConfigError
from train.config import TrainConfig

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"

_USAGE = """\
usage: python -m train CONFIG [--field value ...]

Train, or resume, a model. CONFIG is one of the names below or a path to a .py file with a `config`.
Every field of it has a flag: `python -m train CONFIG --help` lists them with their values.

    python -m train demo
    python -m train demo --optimizer.learning-rate 1e-3 --checkpoint.directory runs/other

Started again, a run resumes from its last checkpoint, to the bit. Ctrl-C finishes the step, saves and stops;
a second one stops at once.

Exit status: 0 done (and the target beaten, where there is one); 1 training failed or the target was missed;
2 the command line or the configuration is wrong; 128 + N stopped by signal N, resumable.

Configurations:
"""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A configuration, and how to report.

    Attributes:
      json: print the summary as one JSON object on stdout; progress goes to stderr anyway.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    json: bool = False


def parse(arguments: list[str]) -> Arguments:
    """Read a command line; prints help or one clear message and exits (0 or 2) where there is nothing to run."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE + "\n".join(f"    {name:18} {_headline(name)}" for name in known_configs()))
        sys.exit(0 if arguments else 2)
    name, *flags = arguments
    if name.startswith("-"):
        raise ConfigError(f"CONFIG must come first, before {name}; it is one of {', '.join(known_configs())}")
    default = Arguments(load_config(name))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                Arguments,
                default=default,
                args=flags,
                prog=f"python -m train {name}",
                description=f"Train or resume {name}. Every field of the configuration has a flag.",
                config=(
                    tyro.conf.AvoidSubcommands,
                ),  # the kind of attention is the configuration file's choice
            )
    except SystemExit as error:
        # tyro frames every ValueError, those of our own validation among them.
        link = error.__context__
        while link is not None and not isinstance(link, ConfigError):
            link = link.__cause__ or link.__context__
        if link is not None:
            raise link from None
        sys.stderr.write(said.getvalue())
        raise


def known_configs() -> list[str]:
    return sorted(p.stem for p in CONFIGS.glob("*.py") if p.stem != "__init__")


def load_config(name: str) -> TrainConfig:
    """The `config` of `configs/NAME.py`, or of the file at the path `name`.

    Raises:
      ConfigError: there is no such file, or its `config` is missing or invalid.
    """
    path = pathlib.Path(name) if name.endswith(".py") else CONFIGS / f"{name}.py"
    if not path.is_file():
        known = known_configs()
        nearest = difflib.get_close_matches(name, known, n=len(known), cutoff=0.0)
        hint = ", ".join([*nearest, *(k for k in known if k not in nearest)])
        raise ConfigError(f"CONFIG = {name!r}: no such configuration; there are {hint}, or name a .py file")
    spec = importlib.util.spec_from_file_location(f"configs.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be read as a configuration: {type(error).__name__}: {error}"
        ) from error
    config = getattr(module, "config", None)
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"{path}: must define `config`, a TrainConfig; it has {type(config).__name__}")
    return config


def _headline(name: str) -> str:
    lines = (CONFIGS / f"{name}.py").read_text().lstrip('"\n').splitlines()
    return lines[0].strip() if lines else ""
