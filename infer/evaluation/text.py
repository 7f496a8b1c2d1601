"""Held-out documents as token ids, and rows of one document each."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mlaflax.checkpoint import CheckpointError, read_description
from mlaflax.config import ConfigError, from_dict, require
from mlaflax.tokenizer import Tokenizer
from train.data import DataConfig, cache, corpora, load_text
from train.data.documents import unique
from train.data.files import read
from train.data.tokens import tokenize


class Text(NamedTuple):
    """Documents to measure on.

    Attributes:
      source: what they are, in words.
      documents: ids of each, the end of text included.
    """

    source: str
    documents: list[np.ndarray]


class Rows(NamedTuple):
    """Rows of text.

    Attributes:
      tokens: int32 `[rows, context]`, each a piece of one document.
      documents: int64 `[rows]`, the document's number.
    """

    tokens: np.ndarray
    documents: np.ndarray


def held_out_text(
    directory: str | os.PathLike,
    tokenizer: Tokenizer,
    files: Sequence[str] = (),
    corpus: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Text:
    """The documents that the run in `directory` did not train on, or those of `files` or `corpus` where given.

    The run's own text is read as training read it and split as it was, by the documents' hashes.

    Raises:
      ConfigError: text that cannot be read, files and a corpus together, or a corpus that the run was trained on.
      CheckpointError: the checkpoint does not say what it was trained on, and neither files nor a corpus are given.
    """
    require(not (files and corpus), "corpus", corpus, "must be left out where text is given")
    if corpus:
        config = DataConfig(corpus=corpus)
        own = ((read_description(directory) or {}).get("training") or {}).get("data") or {}
        require(
            bool(own.get("paths")) or not corpora.shares_documents(corpus, own.get("corpus", "")),
            "corpus",
            corpus,
            f"must be one that the run was not trained on, which is {own.get('corpus')!r}",
        )
        source = f"corpus {corpus!r}"
        say(f"reading {source}")
        documents = list(unique(d for d in corpora.read(corpus) if d.text.strip()))
    elif files:
        config = DataConfig(paths=tuple(files))
        documents = list(unique(d for d in read(files, config.text_field) if d.text.strip()))
        require(bool(documents), "text", ", ".join(files), "holds no text")
        source = ", ".join(files)
    else:
        config = _data_config(directory)
        source = f"held-out documents of {', '.join(config.paths) or f'corpus {config.corpus!r}'}"
        say(f"reading {source}")
        documents = load_text(config).held_out
    found = list(tokenize(documents, tokenizer, cache.directory(config.cache_dir)))
    return Text(source, [np.asarray(d, np.int32) for d in found])


def _data_config(directory: str | os.PathLike) -> DataConfig:
    description = read_description(directory) or {}
    training = description.get("training")
    if not training or not training.get("data"):
        raise CheckpointError(
            f"{directory}/config.json does not say what text the model was trained on: "
            "give text it has not seen with --text FILE"
        )
    try:
        config = from_dict(DataConfig, training["data"], "data.")
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{directory}/config.json: {error}; give text with --text FILE") from error
    return dataclasses.replace(config, tokenizer=None)  # the checkpoint's own is used


def rows_of(text: Text, context: int, *, max_rows: int = 0, max_documents: int = 0, seed: int = 0) -> Rows:
    """Pieces of exactly `context` tokens, no two of which overlap.

    Documents come in a random order, the first piece of every document before the second of any: as many
    documents as possible for a given number of rows.

    Args:
      max_rows, max_documents: 0 for no limit.

    Raises:
      ConfigError: no document is that long.
    """
    lengths = np.array([len(d) for d in text.documents])
    longest = int(lengths.max(initial=0))
    require(
        longest >= context,
        "context",
        context,
        f"must not exceed the {longest} tokens of the longest of the {text.source} ({len(lengths)} in all)",
    )
    order = np.random.default_rng(seed).permutation(np.flatnonzero(lengths >= context))
    order = order[: max_documents or None]
    pieces = sorted((piece, place) for place, d in enumerate(order) for piece in range(lengths[d] // context))
    pieces = pieces[: max_rows or None]
    tokens = [
        text.documents[order[place]][piece * context : (piece + 1) * context] for piece, place in pieces
    ]
    return Rows(np.stack(tokens), np.array([order[place] for _, place in pieces]))
