"""Prompts with completions as ids: text and id rows are split, checked and truncated alike for pairs and for KTO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nnxdsl.config.data import Feedback, Preferences
from nnxdsl.data.loaders.convert import Example
from nnxdsl.data.loaders.fields import Fields, read_ids
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.encode import Encoder, Split, common_prefix
from nnxdsl.data.tokenizers.messages import Message, Tools, has_loss, is_blank, with_answer


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
    """An example of a prompt and of completions under `names`, truncated to the lengths of `data`.

    Each completion has a mask of its targets under `{name}_mask`, which is empty if all its tokens are.
    """
    prompt = cut_left(split.prompt, data.max_prompt_length, bos)
    parts, masks, longest = {"prompt": prompt}, {}, data.max_completion_length
    whole = {"prompt": split.prompt, **dict(zip(names, split.completions, strict=True))}
    for name, mask in zip(names, split.masks or [[]] * len(names), strict=True):
        parts[name] = whole[name][:longest]
        if mask and not any(mask[:longest]):
            message = (
                f"{name}: none of its first {longest:,} tokens is the assistant's; raise data.max_completion_length"
            )
            raise RowError("no target", message)
        mask = mask[: _targets_end(mask[:longest])]
        parts[name] = parts[name][: len(mask) or None]
        masks[f"{name}_mask"] = [] if all(mask) else mask
    cut = tuple(name for name, ids in whole.items() if len(ids) > (longest if name in names else len(prompt)))
    return Example({**parts, **masks}, cut, (*odd, "merged border") if split.merged else odd, chat)


def _targets_end(mask: list[bool]) -> int:
    """The length of a mask up to its last target; what comes after it is in no loss. 0 without a target."""
    return len(mask) - mask[::-1].index(True) if any(mask) else 0


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


def split_chat(
    context: list[Message],
    turns: Mapping[str, list[Message]],
    tools: Tools | None,
    encoder: Encoder,
    *,
    is_prefill: bool = True,
) -> tuple[Split, tuple[str, ...]]:
    """A chat and completions by field, each one answer of the assistant or several turns; and warnings.

    Of several turns only the assistant's are targets. The prompt then ends before the first target, and before the
    completions differ.

    Args:
        context: Messages of the prompt.
        turns: The messages of each completion, as `turns_after` gives them.
        tools: Of the row.
        encoder: Encodes the chats.
        is_prefill: Whether a last message of the prompt that is the assistant's is continued, or a turn of its own.

    Raises:
        RowError: There is nothing to learn from, or the template cannot render the chat.
    """
    ends_with_answer = is_prefill or context[-1]["role"] != "assistant"
    if ends_with_answer and all(len(messages) == 1 for messages in turns.values()):
        answers = [_answer(name, message) for name, (message,) in turns.items()]
        split = encoder.split_chat(context, answers, tools)
        odd = [kind for one in answers for kind in encoder.check_chat(with_answer(context, one), tools)]
        return split, tuple(odd)
    wholes: list[list[int]] = []
    masks: list[list[bool]] = []
    warnings: list[str] = []
    for name, messages in turns.items():
        try:
            ids, mask, _, odd = encode_chat(context, messages, tools, encoder, is_prefill=is_prefill)
        except RowError as error:
            raise RowError(error.kind, f"{name}: {error.what}") from error
        wholes.append(ids[: _targets_end(mask)])
        masks.append(mask[: _targets_end(mask)])
        warnings += odd
    border = min(common_prefix(wholes[0], wholes[-1]), *(mask.index(True) for mask in masks))
    split = Split(wholes[0][:border], [ids[border:] for ids in wholes], False, [mask[border:] for mask in masks])
    return split, tuple(warnings)


def turns_after(name: str, side: list[Message], context: list[Message]) -> list[Message]:
    """The messages in field `name` after those of the prompt, which the field may repeat."""
    rest = side[len(context) :] if side[: len(context)] == context else side
    if all(message["role"] != "assistant" for message in rest):
        roles = ", ".join(message["role"] for message in rest) or "nothing"
        raise RowError("no answer", f"{name}: expected messages of the assistant after the prompt, got {roles}")
    return rest


def _answer(name: str, message: Message) -> Message:
    if is_blank(message):
        raise RowError("empty completion", f"{name} is empty")
    if not has_loss(message):
        raise RowError("no target", f"{name}: its message has weight 0, so there is nothing to learn")
    return message


def encode_chat(
    context: list[Message],
    messages: list[Message],
    tools: Tools | None,
    encoder: Encoder,
    loss_on: str = "assistant",
    *,
    is_prefill: bool = True,
) -> tuple[list[int], list[bool], list[bool], tuple[str, ...]]:
    """Ids of messages after those of `context`, the masks of the assistant's tokens and of those of weight 0, warnings.

    `is_prefill`: a last message of `context` that is the assistant's is the beginning of the first of `messages`.

    Raises:
        RowError: There is nothing to learn from, or as `Encoder.conversation`.
    """
    is_prefilled = is_prefill and bool(context) and context[-1]["role"] == messages[0]["role"] == "assistant"
    whole = [*(with_answer(context, messages[0]) if is_prefilled else [*context, messages[0]]), *messages[1:]]
    first = len(context) - is_prefilled
    answers = [turn for turn in range(first, len(whole)) if whole[turn]["role"] == "assistant"]
    if not answers:
        raise RowError("no target", "no message is the assistant's, so there is nothing to learn")
    scope = answers[-1:] if loss_on == "last_assistant" else answers
    learnt = [turn for turn in scope if has_loss(whole[turn])]
    reads_turns = loss_on in ("assistant", "last_assistant")
    if reads_turns and not learnt:
        raise RowError("no target", "no message of the assistant that the loss reads has a weight other than 0")
    if any(is_blank(whole[turn]) for turn in learnt):
        raise RowError("empty completion", "an assistant's message is empty")
    silent = [] if reads_turns else [turn for turn in answers if not has_loss(whole[turn])]
    ids, mask, warnings = encoder.conversation(whole, learnt if reads_turns else answers, tools)
    excluded = encoder.conversation(whole, silent, tools)[1] if silent else []
    excluded = [*excluded, *[False] * len(ids)][: len(ids)]  # the end token of the last turn may differ
    if is_prefilled:
        start = common_prefix(encoder.prompt(context, tools), ids)
        mask[:start] = [False] * start
    return ids, mask, excluded, (*encoder.check_chat(whole, tools), *warnings)
