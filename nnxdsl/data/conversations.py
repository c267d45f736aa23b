"""Conversations for supervised fine-tuning, as one token sequence each with its targets marked."""

from __future__ import annotations

from nnxdsl.data.chat import Message, read_messages
from nnxdsl.data.dataset import Sequences
from nnxdsl.data.encode import Encoder
from nnxdsl.data.fields import Fields, read_text_or_chat, require
from nnxdsl.data.gather import Example, gather, load, require_fit
from nnxdsl.data.markers import Markers
from nnxdsl.data.rows import RowError
from nnxdsl.data.tokenizer import TokenizerBase
from nnxdsl.spec.data import Conversations
from nnxdsl.spec.errors import DataError

SCOPES = ("assistant", "completion", "all")
COMPLETION_READS = "objective.loss_on='completion' reads prompt and completion; use 'assistant' for whole conversations"
READS = "Data.Conversations reads messages (or conversations), or prompt/completion (text or messages)"


@load.register(Conversations)
def load_conversations(
    data: Conversations,
    tokenizer: TokenizerBase,
    *,
    max_position: int | None = None,
    loss_on: str = "assistant",
    vocabulary: int | None = None,
) -> Sequences:
    """Conversations of a file; see `load`.

    A row has `messages` (or `conversations`), or `prompt` and `completion` as text or as messages. Targets are the
    assistant's turns with their ends, or a completion of text; with `loss_on="completion"` all that follows the prompt,
    whoever says it; with `loss_on="all"` every token after the first. A row that is too long is cut on its right.
    Markers of the tokenizer in the row's own text are refused; plain text may begin with BOS and end with EOS.
    """
    if loss_on not in SCOPES:
        raise DataError(f"loss_on: expected {', '.join(map(repr, SCOPES[:-1]))} or {SCOPES[-1]!r}, got {loss_on!r}")
    encoder, markers = Encoder(tokenizer), Markers(tokenizer)

    def convert(row: Fields) -> Example:
        if loss_on == "completion" and not ("prompt" in row and "completion" in row):
            require(row, ("prompt", "completion"), COMPLETION_READS)
        ids, said, merged, chat = _encode(row, encoder, markers)
        targets = said if loss_on == "assistant" else [True] * len(ids)
        if loss_on == "completion":
            _require_answer(row["completion"])
            first = said.index(True)
            targets = [False] * first + targets[first:]
        return sequence(ids, targets, data.max_length, merged=merged, chat=chat)

    kept = gather(data, convert, ("tokens", "target"), tokenizer=tokenizer, vocabulary=vocabulary)
    require_fit(kept.parts["tokens"].lengths, kept, max_position, "lower data.max_length")
    return Sequences(kept)


def sequence(ids: list[int], targets: list[bool], longest: int, *, merged: bool = False, chat: bool = False) -> Example:
    """A sequence cut on its right to `longest`; its first token is never a target, having nothing before it.

    Raises:
        RowError: No target is left.
    """
    targets = [False, *targets[1:longest]]
    if not any(targets):
        where = f" in its first {longest:,} tokens; raise data.max_length" if len(ids) > longest else ""
        raise RowError("no target", f"the row has no token to learn from{where}")
    parts = {"tokens": ids[:longest], "target": [int(target) for target in targets]}
    cut = ("tokens",) if len(ids) > longest else ()
    return Example(parts, cut, ("merged border",) if merged else (), chat)


def _encode(row: Fields, encoder: Encoder, markers: Markers) -> tuple[list[int], list[bool], bool, bool]:
    """Ids, which of them are the assistant's, whether a border was merged, whether the row is a chat."""
    name = next((name for name in ("messages", "conversations") if name in row), None)
    if name is not None:
        messages, first = read_messages(row[name], name), 0
        markers.messages(messages, name)
    else:
        if "prompt" not in row and "completion" not in row:
            require(row, ("messages",), READS)
        require(row, ("prompt", "completion"), READS)
        prompt, completion = (read_text_or_chat(row, part) for part in ("prompt", "completion"))
        if isinstance(prompt, str) and isinstance(completion, str):
            return (*_encode_text(prompt, completion, encoder, markers), False)
        context = _messages(prompt, "prompt", "user", markers)
        messages, first = [*context, *_messages(completion, "completion", "assistant", markers)], len(context)
    answers = [message for message in messages[first:] if message["role"] == "assistant"]
    if not answers:
        raise RowError("no target", "no message is the assistant's, so there is nothing to learn")
    if not all(message["content"].strip() or "tool_calls" in message for message in answers):
        raise RowError("empty completion", "an assistant's message is empty")
    return (*encoder.conversation(messages, first), True)


def _encode_text(
    prompt: str, completion: str, encoder: Encoder, markers: Markers
) -> tuple[list[int], list[bool], bool]:
    prompt = markers.text(prompt, "prompt", opens=True)
    completion = markers.text(completion, "completion", ends=True)
    if not completion.strip():
        raise RowError("empty completion", "the completion is empty")
    split = encoder.split_text(prompt, (completion,))
    said = split.completions[0]
    markers.ids(said[:-1], prompt + completion, "fields 'prompt' and 'completion' together")
    return split.prompt + said, [False] * len(split.prompt) + [True] * len(said), split.merged


def _require_answer(completion: str | list[Message]) -> None:
    """Refuses a completion that the assistant does not begin: it would not be known where its first turn begins."""
    speaker = "assistant" if isinstance(completion, str) else read_messages(completion, "completion")[0]["role"]
    if speaker != "assistant":
        raise RowError(
            "not an answer", f"field 'completion': begins with a message of {speaker!r}, not the assistant's"
        )


def _messages(value: str | list[object], name: str, role: str, markers: Markers) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": markers.text(value, name, ends=role == "assistant")}]
    messages = read_messages(value, name)
    markers.messages(messages, name)
    return messages
