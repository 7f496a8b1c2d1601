"""DeepSeek models in transformers, as the other side of the comparison. Needs the parity extra."""

import json
import pathlib
import tempfile
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.parity.golden import PAD, Batch

transformers.utils.logging.disable_progress_bar()
# It warns of a rope factor that is not max_position_embeddings / original length; ours are drawn at random.
transformers.utils.logging.set_verbosity_error()


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weight files that transformers writes for `config`."""
    with tempfile.TemporaryDirectory() as directory:
        _class(config)(_config(config)).save_pretrained(directory)
        return {
            k: v.shape for k, v in sorted(load_file(pathlib.Path(directory) / "model.safetensors").items())
        }


def load_model(config: dict[str, Any], weights: dict[str, np.ndarray]) -> Any:
    """The model, loaded from files as a user would, in float32 with eager attention.

    Raises:
      AssertionError: if a weight was missing, left over or misshapen.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config))
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    model, report = loaded
    wrong = {k: v for k, v in report.items() if v}
    assert not wrong, wrong
    return model.eval()


@torch.no_grad()
def alone(model: Any, document: np.ndarray) -> np.ndarray:
    """Logits float32 `[n, w]` of one document, as simply as they can be had."""
    return model(torch.from_numpy(document).long()[None], use_cache=False).logits[0].float().numpy()


@torch.no_grad()
def logits(model: Any, batch: Batch, layout: str) -> np.ndarray:
    """Logits `[b, q, w]` of a batch, with the arguments transformers wants for that layout."""
    tokens, positions = torch.from_numpy(batch.tokens).long(), torch.from_numpy(batch.positions).long()
    if layout == "packed":
        # Told by positions that restart: each token of the padding is a document of its own.
        return model(tokens, position_ids=positions, use_cache=False).logits.double().numpy()
    mask = torch.from_numpy(batch.segment_ids > 0).long()
    return model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits.double().numpy()


@torch.no_grad()
def generate(model: Any, prompt: np.ndarray, count: int) -> np.ndarray:
    """`count` greedy tokens after `prompt`, int32 `[n]` each."""
    out = model.generate(
        torch.from_numpy(prompt).long()[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    return out[0, len(prompt) :].numpy().astype(np.int32)


def _config(config: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(**config)


def _class(config: dict[str, Any]) -> Any:
    return getattr(transformers, config["architectures"][0])
