"""Prompts that a policy answers itself: ids of the prompt, and everything else of the row as it stands there."""

from __future__ import annotations

from typing import Any

from nnxdsl.data.chat import read_messages
from nnxdsl.data.dataset import Prompts
from nnxdsl.data.encode import Encoder
from nnxdsl.data.fields import Fields, read_text_or_chat, require
from nnxdsl.data.gather import Example, gather, load
from nnxdsl.data.markers import Markers
from nnxdsl.data.preferences import cut_left
from nnxdsl.data.rows import RowError
from nnxdsl.data.tokenizer import TokenizerBase
from nnxdsl.spec import data as spec
from nnxdsl.spec.errors import DataError

READS = "Data.Prompts reads prompt (text or messages); all other fields of a row are given to rewards"


@load.register(spec.Prompts)
def load_prompts(
    data: spec.Prompts,
    tokenizer: TokenizerBase,
    *,
    max_position: int | None = None,
    loss_on: str = "assistant",
    vocabulary: int | None = None,
) -> Prompts:
    """Prompts of a file; see `load`. `loss_on` has no meaning here: the policy's own answers are the targets.

    `prompt` is text, which is BOS + prompt, or chat messages, which are rendered with the opening of the model's turn.
    One that is too long is cut on its left, after BOS if it opens with one.
    """
    encoder, markers = Encoder(tokenizer), Markers(tokenizer)

    def convert(row: Fields) -> Example:
        require(row, ("prompt",), READS)
        prompt: Any = read_text_or_chat(row, "prompt")
        is_chat = not isinstance(prompt, str)
        if is_chat:
            prompt = read_messages(prompt, "prompt")
            markers.messages(prompt, "prompt")
        else:
            prompt = markers.text(prompt, "prompt", opens=True)
        if not (any(message["content"].strip() for message in prompt) if is_chat else prompt):
            raise RowError("empty prompt", "the prompt is empty")
        ids = encoder.prompt(prompt)
        kept = cut_left(ids, data.max_prompt_length, tokenizer.bos_id)
        return Example({"prompt": kept}, ("prompt",) if len(kept) < len(ids) else (), chat=is_chat, columns=dict(row))

    kept = gather(data, convert, ("prompt",), tokenizer=tokenizer, vocabulary=vocabulary)
    prompts = Prompts(kept, data.max_response_length)
    longest = kept.parts["prompt"].longest + data.max_response_length
    if max_position is not None and longest > max_position:
        raise DataError(
            f"{data.path}: the longest prompt and an answer to it may take {longest:,} tokens, more than the model's "
            f"{max_position:,} positions; lower data.max_prompt_length or data.max_response_length"
        )
    return prompts
