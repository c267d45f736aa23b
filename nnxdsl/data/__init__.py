"""What a run learns from: files to rows to tokens to typed batches, in numpy. Knows no jax and no model."""

from nnxdsl.data import conversations, feedback, preferences, prompts, text
from nnxdsl.data.batch import PairBatch, RolloutBatch, SequenceBatch
from nnxdsl.data.chat import ChatTemplate
from nnxdsl.data.dataset import Dataset, Pairs, Prompts, Sequences
from nnxdsl.data.encode import Encoder, stop_ids
from nnxdsl.data.gather import load
from nnxdsl.data.messages import read_messages
from nnxdsl.data.order import Batches, permutation
from nnxdsl.data.report import Report
from nnxdsl.data.rows import file_digest
from nnxdsl.data.tokenizer import BytesTokenizer, TokenizerBase, open_tokenizer

__all__ = [
    "Batches",
    "BytesTokenizer",
    "ChatTemplate",
    "Dataset",
    "Encoder",
    "PairBatch",
    "Pairs",
    "Prompts",
    "Report",
    "RolloutBatch",
    "SequenceBatch",
    "Sequences",
    "TokenizerBase",
    "conversations",
    "feedback",
    "file_digest",
    "load",
    "open_tokenizer",
    "permutation",
    "preferences",
    "prompts",
    "read_messages",
    "stop_ids",
    "text",
]
