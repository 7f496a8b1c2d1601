"""Converted weights as a checkpoint that decoding and training open."""

import glob
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

from flax import nnx

from mlaflax.checkpoint import CheckpointError, Checkpoints, model_trees, write_description
from mlaflax.config import ModelConfig
from mlaflax.convert.layout import load_params
from mlaflax.files import write_whole
from mlaflax.model.transformer import Transformer
from mlaflax.tokenizer import Tokenizer


def require_absent(out: str | os.PathLike) -> None:
    """Raise `CheckpointError` if there is something at `out` already, or no folder to make it in."""
    path = pathlib.Path(out)
    if path.exists():
        raise CheckpointError(f"OUT = {str(out)!r}: exists already; name a directory that does not")
    if not path.absolute().parent.is_dir():
        raise CheckpointError(f"OUT = {str(out)!r}: must be in a directory that exists")


def leftovers(out: str | os.PathLike) -> list[str]:
    """What conversions to `out` that were killed left beside it. Another one that still runs has its own there, too."""
    path = pathlib.Path(out).absolute()
    return sorted(map(str, path.parent.glob(f".{glob.escape(path.name)}.??????*")))


def write_checkpoint(
    out: str | os.PathLike,
    config: ModelConfig,
    params: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    tokenizer_config: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of step 0 to the directory `out`, which appears whole or not at all.

    Args:
      params: nested dict in the names and shapes of docs/design.md.
      tokenizer_config: for tokenizer_config.json; `eos_token` there names the end of text.

    Raises:
      CheckpointError: `out` exists, or cannot be written.
      ConfigError: parameters that are not those of `config`.
    """
    require_absent(out)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    load_params(model, params)
    files = {}
    if tokenizer_config is not None:
        text = json.dumps(dict(tokenizer_config), indent=1, ensure_ascii=False)
        files["tokenizer_config.json"] = (text + "\n").encode()
    write_model(out, config, model, tokenizer, files)


def write_model(
    out: str | os.PathLike,
    config: ModelConfig,
    model: Transformer,
    tokenizer: Tokenizer | None,
    files: Mapping[str, bytes],
) -> None:
    """Write `model` as a checkpoint of step 0, with `files` beside it; `out` appears whole or not at all.

    Raises:
      CheckpointError: `out` exists, or cannot be written.
    """
    require_absent(out)
    target = pathlib.Path(out).absolute()
    beside = pathlib.Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        write_description(beside, config, tokenizer)
        for name, content in files.items():
            if name != "tokenizer.json":  # written with the description
                write_whole(beside / name, content.decode("utf-8"))
        with Checkpoints(beside) as checkpoints:
            checkpoints.save(0, {"model": model_trees(model)}, {})
            checkpoints.wait()
        (beside / ".lock").unlink(missing_ok=True)
        os.chmod(beside, 0o755)
        os.rename(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
