"""Preference pairs: from every form of a row to a prompt and two completions in token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nnxdsl.config.data import Feedback, Preferences
from nnxdsl.data.dataset import TokenizedRows
from nnxdsl.data.loaders.build import build_dataset, load, require_fit
from nnxdsl.data.loaders.completions import require_prompt, split_chat, split_ids, split_text, truncated, turns_after
from nnxdsl.data.loaders.convert import Example
from nnxdsl.data.loaders.fields import Fields, other_forms, read_number, read_text_or_chat, require
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.loaders.token_cache import TokenCache
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.encode import Encoder, Split
from nnxdsl.data.tokenizers.messages import Message, content_of, read_tools, require_no_media

READS = "Data.Preferences reads prompt/chosen/rejected (text or messages) or prompt_ids/chosen_ids/rejected_ids"
SIDES = ("chosen", "rejected")
IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
COLUMNS = ("prompt", *SIDES, "tools")
MASKS = ("chosen_mask", "rejected_mask")


@load.register(Preferences)
def load_preferences(
    data: Preferences,
    tokenizer: TokenizerBase,
    *,
    max_position: int | None = None,
    loss_on: str = "assistant",
    vocabulary: int | None = None,
    cache: TokenCache | None = None,
) -> Pairs:
    """Preference pairs of a file; see `load`. Targets are the completions, whatever `loss_on`.

    The forms of a row:

    - `prompt`, `chosen`, `rejected` as text: BOS + prompt, completion + EOS, nothing else added.
    - as chat messages: the prompt is the rendered chat with its generation prompt, a completion one assistant message,
      or several turns, of which the assistant's alone are targets. With chat completions, a prompt of text is one user
      message; with a chat prompt, a completion of text is one assistant message. Completions may repeat the prompt's
      messages.
    - without `prompt`: the common beginning of chosen and rejected, by message for chats, by token for text.
    - `prompt_ids`, `chosen_ids`, `rejected_ids`: used unchanged, without BOS or EOS.

    Special tokens in the text of a row are refused; plain text may begin with BOS, and a completion end with EOS.

    With `data.margin`, each row has a number in the column of this name.

    A prompt that is too long is truncated on its left, after its BOS; a completion that is too long is truncated on its
    right and then has no end token.
    """
    encoder = Encoder.of(tokenizer, data, remedy="take it out, or give token ids")

    def convert(row: Fields) -> Example:
        converted = example(row, encoder, data, vocabulary)
        if data.margin is None:
            return converted
        margin = np.float32(read_number(row, data.margin)).tobytes()
        return converted._replace(parts={**converted.parts, "margin": margin})

    margin = () if data.margin is None else ("margin",)
    reads = {*COLUMNS, *IDS, *(() if data.margin is None else (data.margin,))}
    rows = build_dataset(
        data,
        convert,
        ("prompt", *SIDES, *MASKS, *margin),
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        reads=reads,
        cache=cache,
    )
    require_pairs_fit(rows, max_position)
    return Pairs(rows)


def require_pairs_fit(rows: TokenizedRows, max_position: int | None) -> None:
    """`require_fit` of prompts with the longer of their completions."""
    prompt, chosen, rejected = (rows.parts[name].lengths for name in ("prompt", *SIDES))
    remedy = "lower data.max_prompt_length or data.max_completion_length"
    require_fit(lambda index: prompt[index] + np.maximum(chosen[index], rejected[index]), rows, max_position, remedy)


def example(row: Fields, encoder: Encoder, data: Preferences | Feedback, vocabulary: int | None) -> Example:
    """A preference pair as ids, truncated to the lengths of `data`.

    Raises:
        RowError: There is nothing to learn from it.
    """
    is_ids = any(name in row for name in IDS)
    if is_ids:
        split, chat, odd = _split_ids(row, encoder, vocabulary), False, other_forms(row, "/".join(IDS), COLUMNS)
    else:
        split, chat, odd = _split_row(row, encoder)
    if not split.prompt:
        raise RowError("empty prompt", "the prompt is empty")
    _require_difference(*split.completions)
    pair = truncated(split, SIDES, data, None if is_ids else encoder.tokenizer.bos_id, odd, chat)
    if pair.parts["chosen"] == pair.parts["rejected"]:
        raise RowError(
            "identical after cutting",
            f"chosen and rejected differ only after their first {data.max_completion_length:,} tokens; raise "
            f"data.max_completion_length",
        )
    return pair


def _require_difference(chosen: Sequence[object] | str, rejected: Sequence[object] | str) -> None:
    if chosen == rejected:
        raise RowError("identical", "chosen and rejected are the same, so there is nothing to prefer")


def _split_ids(row: Fields, encoder: Encoder, vocabulary: int | None) -> Split:
    require(row, IDS, READS)
    split = split_ids(row, IDS, encoder, vocabulary)
    for name, completion in zip(SIDES, split.completions, strict=True):
        if not completion:
            raise RowError("empty completion", f"{name}_ids is empty")
    return split


def _split_row(row: Fields, encoder: Encoder) -> tuple[Split, bool, tuple[str, ...]]:
    """A row of text or chats as ids, whether it is a chat, and warnings."""
    require(row, SIDES, READS)
    require_no_media(row)
    sides = [read_text_or_chat(row, name) for name in SIDES]
    prompt = read_text_or_chat(row, "prompt") if "prompt" in row else None
    if any(isinstance(part, list) for part in (prompt, *sides)):
        split, odd = _split_chat(row, prompt, encoder)
        return split, True, odd
    encoder.require_plain()
    opens = prompt is None
    chosen, rejected = (
        encoder.guard.text(str(s), n, opens=opens, ends=True) for n, s in zip(SIDES, sides, strict=True)
    )
    for name, side in zip(SIDES, (chosen, rejected), strict=True):
        if not side.strip():
            raise RowError("empty completion", f"{name} is empty")
    odd = (*_alike(chosen, rejected), *other_forms(row, "plain text", ("tools",)))
    if not isinstance(prompt, str):
        return _split_implicit_text(chosen, rejected, encoder), False, odd
    prompt = encoder.guard.text(prompt, "prompt", opens=True)
    if not prompt.strip():
        raise RowError("empty prompt", "the prompt is empty")
    return split_text(prompt, {"chosen": chosen, "rejected": rejected}, encoder), False, odd


def _alike(chosen: str, rejected: str) -> tuple[str, ...]:
    """A warning for texts that differ only in line breaks or indentation, which may be intended."""
    return ("differ by blanks alone",) if chosen.split() == rejected.split() else ()


def _split_implicit_text(chosen: str, rejected: str, encoder: Encoder) -> Split:
    _require_difference(chosen, rejected)
    split, decode = encoder.split_common(chosen, rejected), encoder.tokenizer.decode
    if not decode(split.prompt).strip():
        raise RowError(
            "nothing in common",
            "there is no 'prompt', and chosen and rejected share no beginning that could be one",
        )
    for name, completion, side in zip(SIDES, split.completions, (chosen, rejected), strict=True):
        if not decode(completion).strip():
            other = SIDES[name == "chosen"]
            raise RowError(
                "prefix of the other",
                f"there is no 'prompt', and {name} ({len(side):,} characters) is the beginning of {other}, so it would "
                f"be an empty completion",
            )
    return split


def _split_chat(row: Fields, prompt: str | list[object] | None, encoder: Encoder) -> tuple[Split, tuple[str, ...]]:
    sides, tools = (
        [encoder.guard.chat(row[name], name, "assistant") for name in SIDES],
        encoder.guard.tools(read_tools(row)),
    )
    if prompt is None:
        context = _shared_turns(*sides)
        if not context:
            raise RowError(
                "nothing in common", "there is no 'prompt', and chosen and rejected do not share their first message"
            )
    elif isinstance(prompt, list):
        context = encoder.guard.chat(prompt, "prompt", "user")
    else:
        context = _text_prompt(encoder.guard.text(prompt, "prompt"), sides)
    require_prompt(context)
    turns = {name: turns_after(name, side, context) for name, side in zip(SIDES, sides, strict=True)}
    split, odd = split_chat(context, turns, tools, encoder, is_prefill=prompt is not None)
    if not any("tool_calls" in message for messages in turns.values() for message in messages):
        odd += _alike(*("\n".join(map(content_of, messages)) for messages in turns.values()))
    return split, odd


def _shared_turns(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """The common first messages of both sides.

    Raises:
        RowError: One side is a prefix of the other, so that its completion would be empty.
    """
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    _require_difference(chosen, rejected)
    for name, side in zip(SIDES, (chosen, rejected), strict=True):
        if shared == len(side):
            other = SIDES[name == "chosen"]
            raise RowError(
                "prefix of the other",
                f"there is no 'prompt', and {name} ({len(side)} messages) is the beginning of {other}, so it would be "
                f"an empty completion",
            )
    return chosen[:shared]


def _text_prompt(prompt: str, sides: list[list[Message]]) -> list[Message]:
    """A prompt of text with chat completions: one user message, or the common beginning of chats that repeat it."""
    if all(side[0]["role"] == "assistant" for side in sides):
        return [{"role": "user", "content": prompt}]
    context = _shared_turns(*sides)
    while context and context[-1]["role"] == "assistant":
        context.pop()
    if not context or content_of(context[-1]).strip() != prompt.strip():
        raise RowError(
            "nothing in common", "chosen and rejected are whole chats, but do not both begin with the text of 'prompt'"
        )
    return context
