"""Converted weights as a checkpoint that decoding and training open."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from flax import nnx

from mlaflax.checkpoint import CheckpointError, save_model
from mlaflax.cli import CannotDo
from mlaflax.config import ModelConfig
from mlaflax.convert.layout import load_params
from mlaflax.files import new_folder, write_whole
from mlaflax.model.transformer import Transformer
from mlaflax.tokenizer import Tokenizer


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
      ConfigError: `out` exists, or parameters are not those of `config`.
      CannotDo: it cannot be written.
    """
    out = pathlib.Path(out)
    with new_folder(out, "OUT") as unfinished:
        model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
        load_params(model, params)
        try:
            save_model(unfinished, model, tokenizer)
        except CheckpointError as error:
            raise CannotDo(str(error).replace(str(unfinished), str(out))) from error
        if tokenizer_config is not None:
            text = json.dumps(dict(tokenizer_config), indent=1, ensure_ascii=False)
            write_whole(unfinished / "tokenizer_config.json", text + "\n")
