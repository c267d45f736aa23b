"""Prompts with completions as ids: text and id rows are split, checked and truncated alike for pairs and for KTO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nnxdsl.config.data import Feedback, Preferences
from nnxdsl.data.loaders.convert import Example
from nnxdsl.data.loaders.fields import Fields, read_ids
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.encode import Encoder, Split
from nnxdsl.data.tokenizers.messages import Message, has_loss, is_blank


def split_ids(row: Fields, names: Sequence[str], encoder: Encoder, vocabulary: int | None) -> Split:
    """The fields `names` of a row, a prompt and completions in ids below `vocabulary` (the tokenizer's if None)."""
    encoder.require_plain()
    vocab_size = encoder.tokenizer.vocab_size if vocabulary is None else vocabulary
    prompt, *completions = (read_ids(row, name, vocab_size) for name in names)
    return Split(prompt, completions, merged=False)


def split_text(prompt: str, completions: Mapping[str, str], encoder: Encoder) -> Split:
    """A prompt and completions of text by field; refuses special tokens that arise where they meet."""
    split = encoder.split_text(prompt, tuple(completions.values()))
    for (name, text), ids in zip(completions.items(), split.completions, strict=True):
        encoder.guard.ids(ids[:-1], prompt + text, f"fields 'prompt' and '{name}' together")
    return split


def truncated(
    split: Split, names: Sequence[str], data: Preferences | Feedback, bos: int | None, odd: tuple[str, ...], chat: bool
) -> Example:
    """An example of a prompt and of completions under `names`, truncated to the lengths of `data`."""
    whole = {"prompt": split.prompt, **dict(zip(names, split.completions, strict=True))}
    parts = {name: ids[: data.max_completion_length] for name, ids in whole.items()}
    parts["prompt"] = cut_left(split.prompt, data.max_prompt_length, bos)
    cut = tuple(name for name, ids in parts.items() if len(ids) < len(whole[name]))
    return Example(parts, cut, (*odd, "merged border") if split.merged else odd, chat)


def cut_left(prompt: list[int], longest: int, bos: int | None) -> list[int]:
    """The end of a prompt after its BOS, which models trained with one need."""
    if len(prompt) <= longest:
        return prompt
    if bos is not None and prompt[0] == bos and longest > 1:
        return [bos, *prompt[len(prompt) - longest + 1 :]]
    return prompt[-longest:]


def require_prompt(context: Sequence[Message]) -> None:
    """Refuses a chat of blank messages as a prompt."""
    if all(is_blank(message) for message in context):
        raise RowError("empty prompt", "the prompt is empty")


def answer(name: str, side: list[Message], context: list[Message]) -> Message:
    """The assistant's message in field `name` after the prompt's messages, which the field may repeat."""
    rest = side[len(context) :] if side[: len(context)] == context else side
    roles = ", ".join(message["role"] for message in rest) or "nothing"
    if roles != "assistant":
        raise RowError("not one answer", f"{name}: expected one assistant message after the prompt, got {roles}")
    if is_blank(rest[0]):
        raise RowError("empty completion", f"{name} is empty")
    if not has_loss(rest[0]):
        raise RowError("no target", f"{name}: its message has weight 0, so there is nothing to learn")
    return rest[0]
