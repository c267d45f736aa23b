"""Prompts that a policy answers itself: ids of the prompt, and everything else of the row as it stands there."""

from __future__ import annotations

from nnxdsl.config import data as spec
from nnxdsl.data.loaders.build import Example, build_dataset, load
from nnxdsl.data.loaders.fields import Fields, read_text_or_chat, require
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.loaders.preferences import cut_left
from nnxdsl.data.prompts import Prompts
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.encode import Encoder
from nnxdsl.data.tokenizers.messages import is_blank, read_tools
from nnxdsl.data.tokenizers.special_tokens import SpecialTokenGuard
from nnxdsl.errors import DataError

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
    The field `tools` of a chat is
    given to its template. A prompt that is too long is cut on its left, after BOS if it opens with one.
    """
    encoder, markers = Encoder(tokenizer), SpecialTokenGuard(tokenizer)

    def convert(row: Fields) -> Example:
        require(row, ("prompt",), READS)
        value, odd = read_text_or_chat(row, "prompt"), ()
        if isinstance(value, str):
            text = markers.text(value, "prompt", opens=True)
            if not text.strip():
                raise RowError("empty prompt", "the prompt is empty")
            ids = encoder.prompt(text)
        else:
            chat, tools = markers.chat(value, "prompt", "user"), markers.tools(read_tools(row))
            if all(is_blank(message) for message in chat):
                raise RowError("empty prompt", "the prompt is empty")
            ids, odd = encoder.prompt(chat, tools), encoder.check_chat(chat, tools, is_prompt=True)
        prompt_ids = cut_left(ids, data.max_prompt_length, tokenizer.bos_id)
        cut = ("prompt",) if len(prompt_ids) < len(ids) else ()
        return Example({"prompt": prompt_ids}, cut, odd, isinstance(value, list), columns=dict(row))

    rows = build_dataset(data, convert, ("prompt",), tokenizer=tokenizer, vocabulary=vocabulary)
    prompts = Prompts(rows, data.max_completion_length)
    longest = rows.parts["prompt"].longest + data.max_completion_length
    if max_position is not None and longest > max_position:
        raise DataError(
            f"{data.path}: the longest prompt and an answer to it may take {longest:,} tokens, more than the model's "
            f"{max_position:,} positions; lower data.max_prompt_length or data.max_completion_length"
        )
    return prompts
