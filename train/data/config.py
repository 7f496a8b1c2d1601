"""What text to train on and in what shape it reaches the model."""

import dataclasses

from mlaflax.config import require, require_positive, require_types


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text, tokenizer and batches of a training run.

    Attributes:
      corpus: a named corpus (`train.data.CORPORA`): "english" and "bible" need pip packages alone.
      paths: files, directories or glob patterns of your own, used in place of `corpus` when given:
        .jsonl (also .json, .ndjson), .parquet, and any other suffix as UTF-8 text, a file a document.
      text_field: the field of JSONL and the column of Parquet that holds the text.
      tokenizer: path of a tokenizer.json; none trains one on the training documents, with as many
        entries as the model's vocabulary.
      sequence_length: tokens in a row.
      batch_size: rows in a batch, over all hosts together.
      align: pieces of documents start at multiples of it in a row, padded to them. 1 becomes the mixed cache's page
        where that is trained for, as its pages begin where documents do.
      needle_share: the part of the pieces into which facts and questions about them are put.
      needle_facts: facts in such a piece of `sequence_length` tokens; shorter pieces have fewer, in
        proportion.
      needle_questions: questions for each fact, on average.
      position_span: positions skip in pieces with needles, so that rope sees distances up to this
        many tokens in short rows (arXiv:2309.10400); 0 for none.
      seed: order of the documents, each epoch having its own, and needles.
      held_out_fraction: the part of the text, in whole documents, that is never trained on.
      max_documents: keep the first so many documents; 0 keeps all.
      prefetch: batches made ahead by a thread; 0 makes each when it is asked for.
      cache_dir: where downloads and token files live; none is $XDG_CACHE_HOME/mlaflax or ~/.cache/mlaflax.
    """

    corpus: str = "english"
    paths: tuple[str, ...] = ()
    text_field: str = "text"
    tokenizer: str | None = None
    sequence_length: int = 512
    batch_size: int = 16
    align: int = 1
    needle_share: float = 0.0
    needle_facts: int = 16
    needle_questions: int = 2
    position_span: int = 0
    seed: int = 0
    held_out_fraction: float = 0.04
    max_documents: int = 0
    prefetch: int = 2
    cache_dir: str | None = None

    def __post_init__(self):
        require(not isinstance(self.paths, str), "data.paths", self.paths, "must be a tuple of paths")
        require_types(self, "data.")
        require_positive(
            self, "data.", "sequence_length", "batch_size", "align", "needle_facts", "needle_questions"
        )
        require(
            self.sequence_length % self.align == 0,
            "data.sequence_length",
            self.sequence_length,
            f"must be a multiple of data.align ({self.align})",
        )
        require(
            0 <= self.needle_share <= 1, "data.needle_share", self.needle_share, "must lie between 0 and 1"
        )
        span = self.position_span
        require(
            span == 0 or span >= self.sequence_length,
            "data.position_span",
            span,
            f"must be 0 or at least data.sequence_length ({self.sequence_length})",
        )
        require(
            span == 0 or self.needle_share > 0,
            "data.position_span",
            span,
            "needs a data.needle_share above 0: positions skip in pieces with needles",
        )
        require(
            0 < self.held_out_fraction < 1,
            "data.held_out_fraction",
            self.held_out_fraction,
            "must lie between 0 and 1, both excluded",
        )
        for name in ("seed", "max_documents", "prefetch"):
            value = getattr(self, name)
            require(value >= 0, f"data.{name}", value, "must be 0 or more")
        require(all(self.paths), "data.paths", self.paths, "each must name a file, a directory or a pattern")
        for name in ("tokenizer", "cache_dir"):
            value = getattr(self, name)
            require(
                value is None or (bool(value) and "\0" not in value),
                f"data.{name}",
                value,
                "must name a path",
            )
        require(bool(self.text_field), "data.text_field", self.text_field, "must name a field")
        require(
            bool(self.corpus or self.paths),
            "data.corpus",
            self.corpus,
            "must name a corpus unless paths are given",
        )
