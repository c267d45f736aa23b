"""Preference pairs: every form in which files have them, as a prompt and two completions in token ids."""

from __future__ import annotations

from nnxdsl.config.data import Feedback, Preferences
from nnxdsl.data.loaders.build import Example, build_dataset, load, require_fit
from nnxdsl.data.loaders.fields import Fields, other_forms, read_ids, read_text_or_chat, require
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.encode import Encoder, Split
from nnxdsl.data.tokenizers.messages import Message, content_of, is_blank, read_tools
from nnxdsl.data.tokenizers.special_tokens import SpecialTokenGuard

READS = "Data.Preferences reads prompt/chosen/rejected (text or messages) or prompt_ids/chosen_ids/rejected_ids"
SIDES = ("chosen", "rejected")
IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
COLUMNS = ("prompt", *SIDES, "tools")


@load.register(Preferences)
def load_preferences(
    data: Preferences,
    tokenizer: TokenizerBase,
    *,
    max_position: int | None = None,
    loss_on: str = "assistant",
    vocabulary: int | None = None,
) -> Pairs:
    """Preference pairs of a file; see `load`. `loss_on` has no meaning here: completions are always the targets.

    The forms of a row:

    - `prompt`, `chosen`, `rejected` as text: BOS + prompt, completion + EOS, nothing else added.
    - as chat messages: the prompt is the rendered chat with its generation prompt, a completion one assistant message.
      A prompt that is text beside chat completions is one user message; a completion that is text beside a chat prompt
      is one assistant message. Completions that repeat the prompt's messages are understood.
    - without `prompt`: what chosen and rejected share at their beginning, by message for chats, by token for text.
    - `prompt_ids`, `chosen_ids`, `rejected_ids`: used as they are, with no BOS or EOS added.

    Markers of the tokenizer in the text of a row are refused; plain text may begin with BOS, a completion end with EOS.

    A prompt that is too long is cut on its left, after BOS if it opens with one; both sides keep the same prompt. A
    completion that is too long is cut on its right and then has no end token.
    """
    encoder, markers = Encoder(tokenizer), SpecialTokenGuard(tokenizer, cure="take it out, or give token ids")

    def convert(row: Fields) -> Example:
        return example(row, encoder, markers, data, vocabulary)

    reads = {*COLUMNS, *IDS}
    rows = build_dataset(data, convert, ("prompt", *SIDES), tokenizer=tokenizer, vocabulary=vocabulary, reads=reads)
    prompt, chosen, rejected = (rows.parts[name].lengths for name in ("prompt", *SIDES))
    longest = chosen.clip(min=rejected)
    require_fit(prompt + longest, rows, max_position, "lower data.max_prompt_length or data.max_completion_length")
    return Pairs(rows)


def example(
    row: Fields, encoder: Encoder, markers: SpecialTokenGuard, data: Preferences | Feedback, vocabulary: int | None
) -> Example:
    """A preference pair as ids, cut to the longest lengths of `data`.

    Ids are below `vocabulary`, or below that of the tokenizer where it is None.

    Raises:
        RowError: There is nothing to learn from it.
    """
    is_ids = any(name in row for name in IDS)
    if is_ids:
        vocab_size = encoder.tokenizer.vocab_size if vocabulary is None else vocabulary
        split, chat = _split_ids(row, vocab_size), False
        odd = other_forms(row, "/".join(IDS), COLUMNS)
    else:
        split, chat, odd = _split_row(row, encoder, markers)
    prompt, (chosen, rejected) = split.prompt, split.completions
    if not prompt:
        raise RowError("empty prompt", "the prompt is empty")
    if chosen == rejected:
        raise RowError("identical", "chosen and rejected are the same, so there is nothing to prefer")
    bos = None if is_ids else encoder.tokenizer.bos_id
    parts = {
        "prompt": cut_left(prompt, data.max_prompt_length, bos),
        "chosen": chosen[: data.max_completion_length],
        "rejected": rejected[: data.max_completion_length],
    }
    if parts["chosen"] == parts["rejected"]:
        raise RowError(
            "identical after cutting",
            f"chosen and rejected differ only after their first {data.max_completion_length:,} tokens; raise "
            f"data.max_completion_length",
        )
    whole = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    cut = tuple(name for name, ids in parts.items() if len(ids) < len(whole[name]))
    return Example(parts, cut, (*odd, "merged border") if split.merged else odd, chat)


def _split_ids(row: Fields, vocab_size: int) -> Split:
    require(row, IDS, READS)
    prompt, *completions = (read_ids(row, name, vocab_size) for name in IDS)
    for name, completion in zip(SIDES, completions, strict=True):
        if not completion:
            raise RowError("empty completion", f"{name}_ids is empty")
    return Split(prompt, completions, merged=False)


def _split_row(row: Fields, encoder: Encoder, markers: SpecialTokenGuard) -> tuple[Split, bool, tuple[str, ...]]:
    """A row of text or chats as ids, whether it is a chat, and what is odd about it."""
    require(row, SIDES, READS)
    sides = [read_text_or_chat(row, name) for name in SIDES]
    prompt = read_text_or_chat(row, "prompt") if "prompt" in row else None
    if any(isinstance(part, list) for part in (prompt, *sides)):
        split, odd = _split_chat(row, prompt, encoder, markers)
        return split, True, odd
    opens = prompt is None
    chosen, rejected = (markers.text(str(s), n, opens=opens, ends=True) for n, s in zip(SIDES, sides, strict=True))
    for name, side in zip(SIDES, (chosen, rejected), strict=True):
        if not side.strip():
            raise RowError("empty completion", f"{name} is empty")
    odd = (*_alike(chosen, rejected), *other_forms(row, "plain text", ("tools",)))
    if not isinstance(prompt, str):
        return _split_implicit_text(chosen, rejected, encoder), False, odd
    prompt = markers.text(prompt, "prompt", opens=True)
    if not prompt.strip():
        raise RowError("empty prompt", "the prompt is empty")
    split = encoder.split_text(prompt, (chosen, rejected))
    for name, side, ids in zip(SIDES, (chosen, rejected), split.completions, strict=True):
        markers.ids(ids[:-1], prompt + side, f"fields 'prompt' and '{name}' together")
    return split, False, odd


def _alike(chosen: str, rejected: str) -> tuple[str, ...]:
    """Two texts of which the preference is for a line break or an indent: it may be meant."""
    return ("differ by blanks alone",) if chosen.split() == rejected.split() else ()


def _split_implicit_text(chosen: str, rejected: str, encoder: Encoder) -> Split:
    if chosen == rejected:
        raise RowError("identical", "chosen and rejected are the same, so there is nothing to prefer")
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


def _split_chat(
    row: Fields, prompt: str | list[object] | None, encoder: Encoder, markers: SpecialTokenGuard
) -> tuple[Split, tuple[str, ...]]:
    sides, tools = [markers.chat(row[name], name, "assistant") for name in SIDES], markers.tools(read_tools(row))
    if prompt is None:
        context = _shared_turns(*sides)
        if not context:
            raise RowError(
                "nothing in common", "there is no 'prompt', and chosen and rejected do not share their first message"
            )
    elif isinstance(prompt, list):
        context = markers.chat(prompt, "prompt", "user")
    else:
        context = _text_prompt(markers.text(prompt, "prompt"), sides)
    if all(is_blank(message) for message in context):
        raise RowError("empty prompt", "the prompt is empty")
    answers = [answer(name, side, context) for name, side in zip(SIDES, sides, strict=True)]
    split = encoder.split_chat(context, answers, tools)
    odd = [kind for one in answers for kind in encoder.check_chat([*context, one], tools)]
    if "tool_calls" not in answers[0] and "tool_calls" not in answers[1]:
        odd += _alike(*map(content_of, answers))
    return split, tuple(odd)


def _shared_turns(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """The messages that both sides share at their beginning.

    Raises:
        RowError: One side is a beginning of the other, so that no answer is left of it.
    """
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == len(chosen) == len(rejected):
        raise RowError("identical", "chosen and rejected are the same, so there is nothing to prefer")
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
    """A prompt that is text beside chats: one user message, or what the chats share if they repeat it."""
    if all(side[0]["role"] == "assistant" for side in sides):
        return [{"role": "user", "content": prompt}]
    context = _shared_turns(*sides)
    if not context or content_of(context[-1]).strip() != prompt.strip():
        raise RowError(
            "nothing in common", "chosen and rejected are whole chats, but do not both begin with the text of 'prompt'"
        )
    return context


def answer(name: str, side: list[Message], context: list[Message]) -> Message:
    """The one assistant message that a side adds to the prompt."""
    rest = side[len(context) :] if side[: len(context)] == context else side
    roles = ", ".join(message["role"] for message in rest) or "nothing"
    if roles != "assistant":
        raise RowError("not one answer", f"{name}: expected one assistant message after the prompt, got {roles}")
    if is_blank(rest[0]):
        raise RowError("empty completion", f"{name} is empty")
    return rest[0]


def cut_left(prompt: list[int], longest: int, bos: int | None) -> list[int]:
    """The end of a prompt; its BOS stays in front, since a model that was trained with one does badly without."""
    if len(prompt) <= longest:
        return prompt
    if bos is not None and prompt[0] == bos and longest > 1:
        return [bos, *prompt[len(prompt) - longest + 1 :]]
    return prompt[-longest:]
