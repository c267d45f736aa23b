"""Prompts for online RL: the prompt in token ids, and the columns of the row for rewards."""

from __future__ import annotations

from nnxdsl.config import data as spec
from nnxdsl.data.environments.opening import OBSERVATION, Opener, with_last_text, with_observation
from nnxdsl.data.loaders.build import build_dataset, load
from nnxdsl.data.loaders.completions import cut_left, require_prompt
from nnxdsl.data.loaders.convert import Example
from nnxdsl.data.loaders.fields import Fields, read_text, read_text_or_chat, require
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.loaders.token_cache import TokenCache
from nnxdsl.data.prompts import Prompts
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.encode import Encoder, Prompt
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
    opener: Opener | None = None,
) -> Prompts:
    """Prompts of a file; see `load`. Targets are the policy's completions, whatever `loss_on`.

    `prompt` is text, to which BOS is added, or chat messages, which are rendered with the generation prompt; the field
    `tools` of a chat is given to its template, or `tools` in place of it, those of an environment. What `reset` of the
    environment of `opener` returns is added to the end of the prompt, also in the row's columns. A prompt that is too
    long is truncated on its left, after its BOS. With `data.privileged_context`, the teacher's prompt is made alike.
    """
    encoder = Encoder.of(tokenizer, data)

    def convert(row: Fields) -> Example:
        require(row, ("prompt",), READS)
        require_no_media(row)
        value, odd, columns = read_text_or_chat(row, "prompt"), (), dict(row)
        if opener is not None:
            observation = encoder.guard.text(opener.observation(row), "observation")
            value = with_observation(value, observation)
            columns |= {"prompt": value, OBSERVATION: observation}
        if isinstance(value, str):
            if tools:
                raise RowError("not a chat", "the environment's tools are in the chat template, but the prompt is text")
            encoder.require_plain()
            prompt, schemas = encoder.guard.text(value, "prompt", opens=True), None
            if not prompt.strip():
                raise RowError("empty prompt", "the prompt is empty")
        else:
            prompt, row_tools = encoder.guard.chat(value, "prompt", "user"), encoder.guard.tools(read_tools(row))
            require_prompt(prompt)
            if row_tools and tools:
                raise RowError("two sets of tools", "field 'tools': the environment has its own tools; take it out")
            schemas = tools or row_tools
            odd = encoder.check_chat(prompt, schemas, is_prompt=True)
        whole = {"prompt": encoder.prompt(prompt, schemas)}
        if data.privileged_context is not None:
            require(row, (data.privileged_context,), "data.privileged_context names the column that the teacher sees")
            context = read_text(row, data.privileged_context)
            context = encoder.guard.text(context, data.privileged_context)
            own_prompt = teacher_prompt(prompt, context, data.teacher_prompt_template)
            whole["teacher_prompt"] = encoder.prompt(own_prompt, schemas)
        ids = {
            name: cut_left(prompt_ids, data.max_prompt_length, tokenizer.bos_id) for name, prompt_ids in whole.items()
        }
        cut = tuple(name for name in ids if len(ids[name]) < len(whole[name]))
        return Example(ids, cut, odd, isinstance(value, list), columns=columns)

    rules = {"tools": tools} if tools else {}
    rules |= {} if opener is None else {"environment": opener.fingerprint()}
    parts = ("prompt", "teacher_prompt") if data.has_teacher_prompts else ("prompt",)
    rows = build_dataset(
        data, convert, parts, tokenizer=tokenizer, vocabulary=vocabulary, cache=cache, rules=rules or None
    )
    prompts = Prompts(rows, data.max_completion_length)
    longest = rows.parts["prompt"].longest + data.max_completion_length
    if max_position is not None and longest > max_position:
        raise DataError(
            f"{data.name}: the longest prompt and a completion may have {longest:,} tokens, more than the model's "
            f"{max_position:,} positions; lower data.max_prompt_length or data.max_completion_length"
        )
    return prompts


def teacher_prompt(prompt: Prompt, context: str, template: str) -> Prompt:
    """The prompt of a teacher with privileged context; of a chat, the template makes the text of the last message.

    Raises:
        RowError: The last message of a chat is not a user's text.
    """
    return with_last_text(
        prompt, lambda text: template.format(prompt=text, privileged_context=context), "privileged context"
    )
