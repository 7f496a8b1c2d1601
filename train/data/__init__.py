"""Text in, packed batches of tokens out.

    data = prepare(DataConfig(corpus="english"), vocab_size=8192)
    batches = data.train_iterator()   # endless; batches.get_state() continues it to the bit
    next(batches)                     # tokens, targets, positions, segment_ids, loss_mask

Every document is its tokens and then `<|endoftext|>`. A batch holds int32 arrays `[b, q]`.
"""

from train.data.config import DataConfig
from train.data.corpora import CORPORA
from train.data.documents import Document, Documents
from train.data.pipeline import PreparedData, TrainIterator, prepare
from train.data.text import load_text

__all__ = [
    "CORPORA",
    "DataConfig",
    "Document",
    "Documents",
    "PreparedData",
    "TrainIterator",
    "load_text",
    "prepare",
]
