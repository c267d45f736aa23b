"""Conversations for SFT: one token sequence each, with a loss mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nnxdsl.config.data import Conversations
from nnxdsl.data.loaders.build import build_dataset, load, require_fit
from nnxdsl.data.loaders.completions import encode_chat, split_text
from nnxdsl.data.loaders.convert import Example
from nnxdsl.data.loaders.fields import Fields, other_forms, read_text_or_chat, require
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.loaders.token_cache import TokenCache
from nnxdsl.data.sequences import Sequences
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.encode import Encoder
from nnxdsl.data.tokenizers.messages import (
    Message,
    read_messages,
    read_tools,
    require_no_media,
)
from nnxdsl.errors import DataError

CHATS = ("messages", "conversations")
PARTS = ("prompt", "completion")
SCOPES = ("assistant", "last_assistant", "completion", "all")
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
    cache: TokenCache | None = None,
) -> Sequences:
    """Conversations of a file; see `load`.

    A row has `messages` (or `conversations`), or `prompt` and `completion` as text or as messages. Targets are the
    assistant's turns with their end tokens, or a completion of text; with `loss_on="last_assistant"` only the last of
    these turns; with `loss_on="completion"` everything after the prompt, of any role; with `loss_on="all"` every token
    after the first. A row that is too long is truncated on its right. Special tokens in the row's text are refused;
    plain text may begin with BOS and end with EOS.
    """
    if loss_on not in SCOPES:
        raise DataError(f"loss_on: expected {', '.join(map(repr, SCOPES[:-1]))} or {SCOPES[-1]!r}, got {loss_on!r}")
    encoder = Encoder.of(tokenizer, data)

    def convert(row: Fields) -> Example:
        if loss_on == "completion":
            require(row, PARTS, COMPLETION_READS)
        require_no_media(row)
        encoded = _encode(row, encoder, loss_on)
        reads_turns = loss_on in ("assistant", "last_assistant")
        targets = encoded.completion_mask if reads_turns else [True] * len(encoded.ids)
        if loss_on == "completion":
            _require_answer(row["completion"], dict(data.roles))
            first = encoded.completion_mask.index(True)
            targets = [False] * first + targets[first:]
        targets = [is_target and not is_out for is_target, is_out in zip(targets, encoded.excluded, strict=True)]
        return sequence(encoded.ids, targets, data.max_length, odd=encoded.odd, chat=encoded.chat)

    reads, parts = {*CHATS, *PARTS, "tools"}, ("tokens", "target")
    rows = build_dataset(
        data, convert, parts, tokenizer=tokenizer, vocabulary=vocabulary, reads=reads, cache=cache, rules=loss_on
    )
    require_fit(rows.parts["tokens"].lengths.__getitem__, rows, max_position, "lower data.max_length")
    return Sequences(rows)


def sequence(
    ids: list[int], targets: list[bool], longest: int, *, odd: tuple[str, ...] = (), chat: bool = False
) -> Example:
    """A sequence truncated to `longest` tokens; its first token is no target, having none before it.

    Raises:
        RowError: No target is left.
    """
    targets = [False, *targets[1:longest]]
    if not any(targets):
        limit = f" in its first {longest:,} tokens; raise data.max_length" if len(ids) > longest else ""
        raise RowError("no target", f"the row has no token to learn from{limit}")
    parts = {"tokens": ids[:longest], "target": targets}
    cut = ("tokens",) if len(ids) > longest else ()
    return Example(parts, cut, odd, chat)


class _Encoded(NamedTuple):
    """A row as ids, the mask of the assistant's tokens and of those that have weight 0, warnings, whether a chat."""

    ids: list[int]
    completion_mask: list[bool]
    excluded: list[bool]
    odd: tuple[str, ...]
    chat: bool


def _encode(row: Fields, encoder: Encoder, loss_on: str) -> _Encoded:
    """One row in its first form, or for `loss_on="completion"` its prompt and completion."""
    guard = encoder.guard
    name = None if loss_on == "completion" else next((name for name in CHATS if name in row), None)
    forms = (*CHATS, *PARTS)
    context: list[Message] = []
    if name is not None:
        # A list of messages; text is refused.
        value = row[name] if isinstance(row[name], list) else read_messages(row[name], name)
        messages = guard.chat(value, name, "user")
        odd = other_forms(row, name, (other for other in forms if other != name))
    else:
        if not any(part in row for part in PARTS):
            require(row, ("messages",), READS)
        require(row, PARTS, READS)
        odd = other_forms(row, "/".join(PARTS), CHATS)
        prompt, completion = (read_text_or_chat(row, part) for part in PARTS)
        if isinstance(prompt, str) and isinstance(completion, str):
            text = _encode_text(prompt, completion, encoder)
            return text._replace(odd=(*odd, *other_forms(row, "plain text", ("tools",)), *text.odd))
        context, messages = guard.chat(prompt, "prompt", "user"), guard.chat(completion, "completion", "assistant")
    tools = guard.tools(read_tools(row))
    ids, mask, excluded, warnings = encode_chat(context, messages, tools, encoder, loss_on)
    return _Encoded(ids, mask, excluded, (*odd, *warnings), chat=True)


def _encode_text(prompt: str, completion: str, encoder: Encoder) -> _Encoded:
    encoder.require_plain()
    prompt = encoder.guard.text(prompt, "prompt", opens=True)
    completion = encoder.guard.text(completion, "completion", ends=True)
    if not completion.strip():
        raise RowError("empty completion", "the completion is empty")
    split = split_text(prompt, {"completion": completion}, encoder)
    (ids,) = split.completions
    odd = (*(() if prompt.strip() else ("blank prompt",)), *(("merged border",) if split.merged else ()))
    mask = [False] * len(split.prompt) + [True] * len(ids)
    return _Encoded(split.prompt + ids, mask, [False] * len(mask), odd, chat=False)


def _require_answer(completion: str | list[Message], roles: Mapping[str, str]) -> None:
    """Refuses a completion whose first message is not the assistant's, since only those have a known first token."""
    role = "assistant" if isinstance(completion, str) else read_messages(completion, "completion", roles)[0]["role"]
    if role != "assistant":
        raise RowError("not an answer", f"field 'completion': begins with a message of {role!r}, not the assistant's")
