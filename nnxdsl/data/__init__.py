"""Training data: from files to rows, tokens and typed batches of numpy arrays. Loads no jax."""

from nnxdsl.data.batch import PairBatch, RolloutBatch, SequenceBatch
from nnxdsl.data.dataset import Dataset
from nnxdsl.data.loaders import conversations, feedback, mixture, preferences, prompts, text
from nnxdsl.data.loaders.build import load
from nnxdsl.data.loaders.report import Report
from nnxdsl.data.loaders.sources import file_digest
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.prompts import Prompts
from nnxdsl.data.sampler import BatchSampler, permutation
from nnxdsl.data.sequences import Sequences
from nnxdsl.data.sources.in_memory import save_rows
from nnxdsl.data.tokenizers.base import BytesTokenizer, TokenizerBase, open_tokenizer
from nnxdsl.data.tokenizers.chat_template import ChatTemplate
from nnxdsl.data.tokenizers.encode import Encoder, stop_ids
from nnxdsl.data.tokenizers.messages import read_messages

__all__ = [
    "BatchSampler",
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
    "mixture",
    "open_tokenizer",
    "permutation",
    "preferences",
    "prompts",
    "read_messages",
    "save_rows",
    "stop_ids",
    "text",
]
