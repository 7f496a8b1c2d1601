"""Token files into batches: shuffled, packed, resumable to the bit, one share per host."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np
from grain import experimental

from mlaflax.config import ConfigError, require
from mlaflax.tokenizer import Tokenizer
from train.data import cache
from train.data.config import DataConfig
from train.data.needle import NeedleTask, skipped_positions
from train.data.text import load_text
from train.data.tokens import TokenFile, tokenize, trained_tokenizer

Batch = dict[str, np.ndarray]

# Rows that are packed at once. Fewer leave more padding (a row's last gap waits for a piece that fits),
# more cost memory and the time to the first batch.
_PACKED_ROWS = 128


class Pieces:
    """Documents cut into pieces that fit a row, by index: a Grain source.

    A piece of n tokens is int32 `[n, 4]`: each token, the one after it in the document, its position and its
    role (see `_LEARNED`). Over all pieces each token of a document but its last (the end of text) is an input
    once, and each but its first a target once: cutting loses no target. Padding brings a piece's length to a
    multiple of `align`, so that whatever follows it in a row starts at one.
    """

    def __init__(self, file: TokenFile, length: int, align: int = 1):
        self._tokens, self._align = file.tokens, align
        first, last = file.offsets[:-1], file.offsets[1:] - 1
        counts = (last - first + length - 1) // length
        document = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.start = first[document] + within * length
        self.stop = np.minimum(self.start + length, last[document])

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        i = int(index)
        window = self._tokens[self.start[i] : self.stop[i] + 1].astype(np.int32)
        return {"piece": self._piece(i, window)}

    def _piece(self, index: int, window: np.ndarray) -> np.ndarray:
        count = len(window) - 1
        return self._padded(window, np.arange(count), np.full(count, _LEARNED))

    def _padded(self, window: np.ndarray, positions: np.ndarray, role: np.ndarray) -> np.ndarray:
        piece = np.stack([window[:-1], window[1:], positions, role], axis=1).astype(np.int32)
        return np.pad(piece, ((0, -len(piece) % self._align), (0, 0)))


class NeedlePieces(Pieces):
    """Pieces a part of which carry needles, and whose positions skip; see `train.data.needle`.

    Which ones they are, and what is in them, follows from `config.seed` and the piece alone: the same in every
    epoch and on any number of hosts.
    """

    def __init__(self, file: TokenFile, config: DataConfig, task: NeedleTask):
        super().__init__(file, config.sequence_length, config.align)
        self._config, self._task = config, task
        tokens = config.needle_facts * (1 + config.needle_questions) * task.statement_length
        require(
            tokens <= config.sequence_length,
            "data.needle_facts",
            config.needle_facts,
            f"takes {tokens} tokens with data.needle_questions, more than data.sequence_length "
            f"({config.sequence_length})",
        )

    def _piece(self, index: int, window: np.ndarray) -> np.ndarray:
        config, count = self._config, len(window) - 1
        rng = np.random.default_rng([config.seed, index])
        facts = config.needle_facts * count // config.sequence_length
        if rng.random() >= config.needle_share or not facts:
            return super()._piece(index, window)
        told = self._task.train_on(window, facts, facts * config.needle_questions, rng)
        role = np.where(told.predictable[1:], _LEARNED, _SEEN)
        positions = np.arange(count)
        if config.position_span:
            positions = skipped_positions(count, config.position_span, config.align, rng)
        return self._padded(told.tokens, positions, role)


# Roles of a token in a piece or row; packing fills the ends of rows with 0, too.
_PADDING, _SEEN, _LEARNED = range(3)


def _to_batch(packed: dict[str, np.ndarray]) -> Batch:
    tokens, targets, positions, role = np.moveaxis(packed["piece"], -1, 0)
    segments = np.where(role == _PADDING, 0, packed["piece_segment_ids"])
    batch = {
        "tokens": tokens,
        "targets": targets,
        "positions": positions,
        "segment_ids": segments,
        "loss_mask": role == _LEARNED,
    }
    return {name: np.ascontiguousarray(array, np.int32) for name, array in batch.items()}


def _rows(pieces: grain.MapDataset, length: int, seed: int) -> grain.IterDataset:
    # Reading is a copy from mapped memory: reader threads would cost more than they save.
    source = pieces.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    return experimental.FirstFitPackIterDataset(
        source, length_struct={"piece": length}, num_packing_bins=_PACKED_ROWS, seed=seed, shuffle_bins=True
    )


class TrainIterator:
    """Endless batches for one host; `get_state` and `set_state` continue it to the bit.

    Each epoch goes through every piece of every document once, in an order of its own; a row may hold the end
    of one epoch and the start of the next.
    """

    def __init__(self, dataset: grain.IterDataset, identity: dict[str, Any]):
        self._iterator = iter(dataset)
        self._identity = identity

    def __iter__(self) -> "TrainIterator":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """JSON-ready: where the next batch starts, and which data it belongs to."""
        return {"identity": self._identity, "grain": json.loads(json.dumps(self._iterator.get_state()))}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue after the batch that was last when `state` was taken.

        Raises:
          ConfigError: if the state was taken with other data, settings or hosts; no such continuation exists.
        """
        was = state.get("identity", {})
        for name, value in self._identity.items():
            if was.get(name) != value:
                raise ConfigError(
                    f"{name} = {value!r}: cannot resume, the saved position was taken with {was.get(name)!r}"
                )
        self._iterator.set_state(state["grain"])

    def close(self) -> None:
        """Stop the prefetching thread."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


@dataclasses.dataclass(frozen=True)
class PreparedData:
    """Tokenized text, ready to iterate over."""

    config: DataConfig
    tokenizer: Tokenizer
    train: TokenFile
    held_out: TokenFile

    @property
    def train_documents(self) -> list[np.ndarray]:
        """Ids of each training document, the end of text included: uint16 or uint32 `[n]`."""
        return list(self.train)

    @property
    def held_out_documents(self) -> list[np.ndarray]:
        """Ids of each held-out document, the end of text included: uint16 or uint32 `[n]`."""
        return list(self.held_out)

    def train_iterator(
        self, state: dict[str, Any] | None = None, host_index: int = 0, host_count: int = 1
    ) -> TrainIterator:
        """Endless batches of `config.batch_size / host_count` rows of `config.sequence_length` tokens.

        A batch holds int32 arrays `[b, q]`: `tokens`; `targets`, the next token of the same document;
        `positions`, from 0 in each piece of a document; `segment_ids`, 1, 2, ... by piece, 0 for padding;
        `loss_mask`, 1 where there is a target and it was not drawn at random for a needle.

        Raises:
          ConfigError: if the rows or pieces cannot be shared among the hosts, or `state` is of other data.
        """
        config = self.config
        local = _share(config.batch_size, host_index, host_count)
        seed = int.from_bytes(hashlib.sha256(f"order {config.seed}".encode()).digest()[:4], "little")
        if config.needle_share:
            pieces = NeedlePieces(self.train, config, NeedleTask(self.tokenizer))
        else:
            pieces = Pieces(self.train, config.sequence_length, config.align)
        require(
            len(pieces) >= host_count,
            "host_count",
            host_count,
            f"there are only {len(pieces)} pieces of text",
        )
        # Grain shuffles epoch n with seed + n: a hash keeps runs of neighbouring seeds apart.
        source = grain.MapDataset.source(pieces).shuffle(seed=seed)[host_index::host_count].repeat()
        dataset = _rows(source, config.sequence_length, seed).batch(local, drop_remainder=True).map(_to_batch)
        if config.prefetch:
            dataset = experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=config.prefetch)
        identity = {
            "data": self.train.fingerprint,
            "data.sequence_length": config.sequence_length,
            "data.batch_size": config.batch_size,
            "data.seed": config.seed,
            "data.align": config.align,
            "data.needle_share": config.needle_share,
            "data.needle_facts": config.needle_facts,
            "data.needle_questions": config.needle_questions,
            "data.position_span": config.position_span,
            "host_index": host_index,
            "host_count": host_count,
        }
        iterator = TrainIterator(dataset, identity)
        if state is not None:
            iterator.set_state(state)
        return iterator

    def eval_batches(
        self, batch_size: int, sequence_length: int, host_index: int = 0, host_count: int = 1
    ) -> Iterator[Batch]:
        """The held-out text, once, always in the same order; rows of padding fill the last batch.

        Batches are as those of `train_iterator`, without needles and skips of positions. Every token of a
        held-out document but its first is a target exactly once over all hosts; all hosts give equally many
        batches.
        """
        require(batch_size > 0, "batch_size", batch_size, "must be greater than 0")
        require(sequence_length > 0, "sequence_length", sequence_length, "must be greater than 0")
        align = self.config.align
        require(
            sequence_length % align == 0,
            "sequence_length",
            sequence_length,
            f"must be a multiple of data.align ({align})",
        )
        local = _share(batch_size, host_index, host_count)
        # Shuffled, so that the first batches are a fair sample: neighbours in a corpus are alike.
        source = grain.MapDataset.source(Pieces(self.held_out, sequence_length, align)).shuffle(seed=0)
        dataset = (
            _rows(source, sequence_length, seed=0).batch(batch_size, drop_remainder=False).map(_to_batch)
        )
        for batch in dataset:
            missing = batch_size - len(batch["tokens"])
            mine = slice(host_index * local, (host_index + 1) * local)
            yield {name: np.pad(rows, ((0, missing), (0, 0)))[mine] for name, rows in batch.items()}


def _share(batch_size: int, host_index: int, host_count: int) -> int:
    require(host_count >= 1, "host_count", host_count, "must be at least 1")
    require(0 <= host_index < host_count, "host_index", host_index, f"must lie in 0 to {host_count - 1}")
    require(
        batch_size % host_count == 0, "data.batch_size", batch_size, f"must divide among {host_count} hosts"
    )
    return batch_size // host_count


def prepare(config: DataConfig, vocab_size: int, say: Callable[[str], None] = lambda _: None) -> PreparedData:
    """Read the text, train or load the tokenizer, and tokenize; all three are cached.

    `say` is told of each before it begins: the first time, they take seconds each.

    Raises:
      ConfigError: for text that cannot be read, or a tokenizer with more ids than `vocab_size`.
    """
    say(f"reading {', '.join(config.paths) or config.corpus}")
    documents = load_text(config)
    root = cache.directory(config.cache_dir)
    if config.tokenizer:
        tokenizer = Tokenizer.load(config.tokenizer)
    else:
        say("tokenizer")
        tokenizer = trained_tokenizer(documents.train, vocab_size, root)
    require(
        tokenizer.vocab_size <= vocab_size,
        "vocab_size",
        vocab_size,
        f"must be at least {tokenizer.vocab_size}, the size of the tokenizer's vocabulary",
    )
    say("tokens")
    train, held_out = (tokenize(part, tokenizer, root) for part in (documents.train, documents.held_out))
    return PreparedData(config, tokenizer, train, held_out)
