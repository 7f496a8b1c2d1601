"""What a converted checkpoint keeps of the folder it came from, so that it can go back the way it came.

`huggingface.json` holds the number format of each tensor and the special token ids of config.json, neither of which
means anything to the model here. The tokenizer's files are copied as they are, both ways.
"""

import collections
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from mlaflax.config import ConfigError, require
from mlaflax.convert.hf_folder import HFFolder, read_json
from mlaflax.convert.hf_writer import FORMATS
from mlaflax.files import write_whole
from mlaflax.tokenizer import PAD, Tokenizer

FILE_NAME = "huggingface.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
)


def write_origin(directory: pathlib.Path, config: Mapping[str, Any], dtypes: Mapping[str, str]) -> None:
    """Write `huggingface.json`: `config` is their config.json, `dtypes` the number format of each tensor."""
    usual = collections.Counter(dtypes.values()).most_common(1)[0][0]
    content = {
        "format": 1,
        "config": {name: config[name] for name in TOKEN_IDS if config.get(name) is not None},
        "dtype": usual,
        "other_dtypes": {name: dtype for name, dtype in dtypes.items() if dtype != usual},
    }
    write_whole(directory / FILE_NAME, json.dumps(content, indent=1) + "\n")


def read_origin(directory: pathlib.Path) -> dict[str, Any] | None:
    """What `write_origin` wrote; None for a checkpoint that was not converted.

    Raises:
      ConfigError: it is damaged.
    """
    path = directory / FILE_NAME
    if not path.exists():
        return None
    content = read_json(path, "what the checkpoint was converted from")
    require(content.get("format") == 1, f"{path}: format", content.get("format"), "must be 1")
    others, ids = content.get("other_dtypes"), content.get("config")
    if not isinstance(others, dict) or not isinstance(ids, dict):
        raise ConfigError(f"{path} is damaged: config and other_dtypes must be objects")
    for dtype in (content.get("dtype"), *others.values()):
        require(dtype in FORMATS, f"{path}: dtype", dtype, f"must be one of {', '.join(FORMATS)}")
    return content


def carried_files(folder: HFFolder) -> list[pathlib.Path]:
    """The tokenizer's files in a folder of theirs.

    Raises:
      ConfigError: one is a link out of the folder.
    """
    return [path for name in TOKENIZER_FILES if (path := folder.inside(name)).is_file()]


def copy_files(files: list[pathlib.Path], directory: pathlib.Path) -> None:
    for file in files:
        shutil.copyfile(file, directory / file.name)


def checked_tokenizer(directory: pathlib.Path, vocab_size: int) -> Tokenizer | None:
    """The tokenizer in a folder, if its ids are rows of the embedding; None where there is no tokenizer.json.

    Raises:
      ConfigError: it is damaged or has more ids than the embedding has rows.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    tokenizer = Tokenizer.load(path)
    require(
        tokenizer.vocab_size <= vocab_size,
        f"{path}: vocabulary",
        tokenizer.vocab_size,
        f"must not exceed the embedding's {vocab_size} rows (vocab_size in config.json)",
    )
    return tokenizer


def describe_tokenizer(directory: pathlib.Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Write the tokenizer_config.json that transformers needs beside a tokenizer trained here."""
    content: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.eos_token,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.pad_id is not None:
        content["pad_token"] = PAD
    write_whole(directory / "tokenizer_config.json", json.dumps(content, indent=1) + "\n")
