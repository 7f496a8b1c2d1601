"""The configured text: a named corpus or files of one's own."""

import itertools

from mlaflax.config import ConfigError
from train.data import corpora, files
from train.data.config import DataConfig
from train.data.documents import Documents, hold_out, unique


def load_text(config: DataConfig) -> Documents:
    """Read the configured text and hold part of it out.

    All of it is in memory at once; `config.max_documents` stops reading early.

    Raises:
      ConfigError: for an unknown corpus, a path or file that cannot be read, or too little text.
    """
    where = f"data.paths = {config.paths!r}" if config.paths else f"data.corpus = {config.corpus!r}"
    if config.paths:
        found = files.read(config.paths, config.text_field)
    else:
        found = corpora.read(config.corpus, config.cache_dir)
    documents = unique(d for d in found if d.text.strip())
    documents = list(itertools.islice(documents, config.max_documents or None))
    if not documents:
        raise ConfigError(f"{where}: holds no text")
    return hold_out(documents, config.held_out_fraction)
