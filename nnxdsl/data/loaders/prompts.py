"""Prompts for online RL: the prompt in token ids, and the columns of the row for rewards."""

from __future__ import annotations

from nnxdsl.config import data as spec
from nnxdsl.data.loaders.build import build_dataset, load
from nnxdsl.data.loaders.completions import cut_left, require_prompt
from nnxdsl.data.loaders.convert import Example
from nnxdsl.data.loaders.fields import Fields, read_text_or_chat, require
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.loaders.token_cache import TokenCache
from nnxdsl.data.prompts import Prompts
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.encode import Encoder
from nnxdsl.data.tokenizers.messages import Tools, read_tools, require_no_media
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
    cache: TokenCache | None = None,
    tools: Tools | None = None,
) -> Prompts:
    """Prompts of a file; see `load`. Targets are the policy's completions, whatever `loss_on`.

    `prompt` is text, to which BOS is added, or chat messages, which are rendered with the generation prompt; the field
    `tools` of a chat is given to its template, or `tools` in place of it, those of an environment. A prompt that is too
    long is truncated on its left, after its BOS.
    """
    encoder = Encoder.of(tokenizer, data)

    def convert(row: Fields) -> Example:
        require(row, ("prompt",), READS)
        require_no_media(row)
        value, odd = read_text_or_chat(row, "prompt"), ()
        if isinstance(value, str):
            if tools:
                raise RowError("not a chat", "the environment's tools are in the chat template, but the prompt is text")
            encoder.require_plain()
            text = encoder.guard.text(value, "prompt", opens=True)
            if not text.strip():
                raise RowError("empty prompt", "the prompt is empty")
            ids = encoder.prompt(text)
        else:
            chat, own = encoder.guard.chat(value, "prompt", "user"), encoder.guard.tools(read_tools(row))
            require_prompt(chat)
            if own and tools:
                raise RowError("two sets of tools", "field 'tools': the environment has its own tools; take it out")
            schemas = tools or own
            ids, odd = encoder.prompt(chat, schemas), encoder.check_chat(chat, schemas, is_prompt=True)
        prompt_ids = cut_left(ids, data.max_prompt_length, tokenizer.bos_id)
        cut = ("prompt",) if len(prompt_ids) < len(ids) else ()
        return Example({"prompt": prompt_ids}, cut, odd, isinstance(value, list), columns=dict(row))

    rules = {"tools": tools} if tools else None
    rows = build_dataset(
        data, convert, ("prompt",), tokenizer=tokenizer, vocabulary=vocabulary, cache=cache, rules=rules
    )
    prompts = Prompts(rows, data.max_completion_length)
    longest = rows.parts["prompt"].longest + data.max_completion_length
    if max_position is not None and longest > max_position:
        raise DataError(
            f"{data.name}: the longest prompt and a completion may have {longest:,} tokens, more than the model's "
            f"{max_position:,} positions; lower data.max_prompt_length or data.max_completion_length"
        )
    return prompts
