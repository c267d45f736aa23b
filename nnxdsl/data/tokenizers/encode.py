"""Encodes text and chats: one BOS, one end token, prompt and completion split in token space."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from nnxdsl.config.data import Data
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.chat_template import ChatTemplate, Span
from nnxdsl.data.tokenizers.messages import Message, Tools, odd_messages, with_answer
from nnxdsl.data.tokenizers.special_tokens import SpecialTokenGuard
from nnxdsl.data.tokenizers.template_check import check_rendered
from nnxdsl.errors import DataError

Prompt = str | list[Message]

_LAST_ANSWER = "\ufdd0answer"
"""Stands for the text of the assistant's last message, which is in tokens already."""


class Split(NamedTuple):
    """A prompt and its completions as ids.

    Attributes:
        prompt: Common ids of all completions.
        completions: The ids after it, each with one end token.
        merged: Whether a token spans the border, so that the prompt is shorter than it would be alone.
        masks: Which tokens of each completion are targets, where it has turns of others; empty if all tokens are.
    """

    prompt: list[int]
    completions: list[list[int]]
    merged: bool
    masks: Sequence[list[bool]] = ()


class Encoder:
    """Encodes texts and chats with a tokenizer and its chat template.

    Attributes:
        tokenizer: The tokenizer.
        guard: Refuses special tokens in the text of rows; `remedy` is the advice in its messages.
        template_args: Further arguments of the chat template.
        system: A system message for chats that have none.
    """

    def __init__(
        self,
        tokenizer: TokenizerBase,
        remedy: str = "take it out",
        *,
        template_args: Mapping[str, Any] | None = None,
        system: str | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_args, self.system = dict(template_args or {}), system
        self.guard = SpecialTokenGuard(tokenizer, remedy, roles)
        self._templates: dict[str, ChatTemplate] = {}
        self._blank: dict[int, bool] = {}

    @classmethod
    def of(cls, tokenizer: TokenizerBase, data: Data, remedy: str = "take it out") -> Encoder:
        """The encoder of the rows of `data`, and of prompts as they are.

        Raises:
            DataError: The chat template does not read the arguments that `data` gives, or renders no system message.
        """
        roles = dict(data.roles)
        encoder = cls(tokenizer, remedy, template_args=data.template_args, system=data.system, roles=roles)
        if encoder.template_args or encoder.system is not None:
            try:
                encoder._require_system(encoder.template())
            except DataError as error:
                raise DataError(f"{data.name}: {error}") from error
        return encoder

    def template(self, tools: Tools | None = None) -> ChatTemplate:
        """The chat template of chats with `tools`, as transformers chooses it: "tool_use" if there is one, or default.

        Raises:
            DataError: The tokenizer has none, it is not valid jinja2, or does not read `template_args`.
        """
        source = self.tokenizer.chat_template
        if tools is not None and self.tokenizer.tool_use_template is not None:
            source = self.tokenizer.tool_use_template
        if source is None:
            raise DataError(
                "the rows are chats, but the tokenizer has no chat template; give one with "
                "Tokenizer.File(path, chat_template=...), or use rows of plain text"
            )
        if source not in self._templates:
            bos, eos = self.tokenizer.bos_token, self.tokenizer.eos_token
            self._templates[source] = ChatTemplate(source, bos_token=bos, eos_token=eos, arguments=self.template_args)
        return self._templates[source]

    def _require_system(self, template: ChatTemplate) -> None:
        """Refuses a system prompt that the template does not render."""
        if self.system is None:
            return
        chat = [{"role": "user", "content": "a"}]
        try:
            what = "" if self.system.strip() in template.render(self.with_system(chat)) else "; it leaves the text out"
        except RowError as error:
            try:
                template.render(chat)
            except RowError:  # a template for other chats; rows say more
                return
            what = f": {error}"
        if what:
            raise DataError(
                f"system: the chat template renders no system message{what}; put the text into the messages of users, "
                f"or give a template that does with Tokenizer.File(path, chat_template=...)"
            )

    def with_system(self, messages: Sequence[Message]) -> list[Message]:
        """The chat with the system message, if it has none."""
        if self.system is None or any(message["role"] in ("system", "developer") for message in messages):
            return list(messages)
        return [{"role": "system", "content": self.system}, *messages]

    def require_plain(self) -> None:
        """Refuses a row that is no chat where settings are for chats alone.

        Raises:
            RowError: There is a system prompt, or an argument of the template.
        """
        for name, value in (("system", self.system), ("template_args", self.template_args)):
            if value:
                raise RowError("not a chat", f"the row is no chat, so {name} of its data has no effect; take it out")

    def text(self, text: str) -> list[int]:
        """Ids of plain text, with one BOS if the tokenizer has one."""
        bos, ids = self.tokenizer.bos_id, self.tokenizer.encode(text)
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def rendered(self, text: str) -> list[int]:
        """Ids of a rendered chat, which has the BOS of its template; a second one is dropped."""
        bos, ids = self.tokenizer.bos_id, self.tokenizer.encode(text)
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def prompt(self, prompt: Prompt, tools: Tools | None = None) -> list[int]:
        """Ids of a prompt for generation: text, or a chat with the generation prompt; see `ChatTemplate.render_prompt`.

        Raises:
            RowError: The template cannot render the chat.
        """
        if isinstance(prompt, str):
            return self.text(prompt)
        return self.rendered(self.template(tools).render_prompt(self.with_system(prompt), tools=tools))

    def after_answer(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Ids behind the text of the assistant's last message: the end of its turn, what follows, and a new turn.

        Args:
            messages: A chat whose last message is of another role. Tool calls of the assistant's last message may come
                before the end of its turn, without their arguments.
            tools: Of the row.

        Raises:
            RowError: The template cannot render the chat, or leaves the assistant's last message out.
        """
        whole = self.with_system(messages)
        last = max(index for index, message in enumerate(whole) if message["role"] == "assistant")
        marked = {**whole[last], "content": _LAST_ANSWER}
        if calls := marked.pop("tool_calls", ()):  # some templates write content or calls, and take names from calls
            named = [{**call, "function": {"name": call["function"]["name"], "arguments": {}}} for call in calls]
            attempts = [{**marked, "tool_calls": named}, marked]
        else:
            attempts = [marked]
        for answer in attempts:
            chat = [*whole[:last], answer, *whole[last + 1 :]]
            text = self.template(tools).render(chat, add_generation_prompt=True, tools=tools)
            _, mark, after = text.rpartition(_LAST_ANSWER)
            if mark:
                return self.tokenizer.encode(after)
        raise RowError("template", "the chat template leaves out the assistant's last message")

    def check_chat(
        self, messages: Sequence[Message], tools: Tools | None = None, *, is_prompt: bool = False
    ) -> tuple[str, ...]:
        """Warnings for a chat that the template renders completely; `is_prompt`: with a generation prompt.

        Raises:
            RowError: The template leaves out a content, a tool call or the tools.
        """
        whole = self.with_system(messages)
        return (*odd_messages(messages), *check_rendered(self.template(tools), whole, tools, is_prompt=is_prompt))

    def split_text(self, prompt: str, completions: Sequence[str]) -> Split:
        """A prompt and completions of plain text, tokenized together and split in token space."""
        return self._split(self.text(prompt), [self.text(prompt + completion) for completion in completions])

    def split_chat(self, prompt: list[Message], answers: Sequence[Message], tools: Tools | None = None) -> Split:
        """A chat and answers; completions begin where an answer does (see `ChatTemplate.render_prompt`).

        Raises:
            RowError: The template cannot render the chat, or its answers do not begin with its generation prompt.
        """
        prompt = self.with_system(prompt)
        opening = self.template(tools).render_prompt(prompt, tools=tools)
        texts = [self.template(tools).render(with_answer(prompt, answer), tools=tools) for answer in answers]
        for text in texts:
            _require_prefix(opening, text)
        return self._split(self.rendered(opening), [self.rendered(text) for text in texts], is_rendered=True)

    def whole(self, prompt: Prompt, completion: Prompt) -> list[int]:
        """Ids of a prompt and its completion with one end token, both text, or a chat and what follows.

        Raises:
            RowError: The template cannot render the chat.
        """
        if isinstance(prompt, str) and isinstance(completion, str):
            split = self.split_text(prompt, (completion,))
            return [*split.prompt, *split.completions[0]]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        turns = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        chat = self.with_system([*with_answer(messages, turns[0]), *turns[1:]])
        return self.ended(self.rendered(self.template().render(chat)), is_rendered=True)

    def split_common(self, chosen: str, rejected: str) -> Split:
        """Two texts with an implicit prompt: their common first tokens, BOS included."""
        texts = [self.text(chosen), self.text(rejected)]
        shared = common_prefix(*texts)
        return Split(texts[0][:shared], [self.ended(ids[shared:]) for ids in texts], merged=False)

    def conversation(
        self, messages: list[Message], turns: Collection[int] | None = None, tools: Tools | None = None
    ) -> tuple[list[int], list[bool], tuple[str, ...]]:
        """Ids of a chat, the mask of the assistant's tokens, and warnings.

        A template with `{% generation %}` blocks marks these tokens. With another one, they are found by rendering the
        chat before and after each of the assistant's turns, and include the end of the turn.

        Args:
            messages: The chat.
            turns: The messages whose tokens are in the mask, by index; None for all of the assistant's.
            tools: Of the row.

        Raises:
            RowError: The template cannot render the chat; or its blocks mark nothing; or it has none, and renders
                earlier turns differently once later ones follow.
        """
        whole, template = self.with_system(messages), self.template(tools)
        added = len(whole) - len(messages)
        chosen_turns = [
            turn
            for turn, message in enumerate(whole)
            if message["role"] == "assistant" and (turns is None or turn - added in turns)
        ]
        mask_of = self._marked_mask if template.has_generation else self._derived_mask
        ids, mask, merged = mask_of(whole, chosen_turns, tools)
        odd = ("merged border",) if merged else ()
        if any(mask) and template.has_generation and not self._ends_turns(ids, mask):
            odd = (*odd, "generation block without the end of the turn")
        return ids, mask, odd

    def _marked_mask(
        self, messages: list[Message], turns: Sequence[int], tools: Tools | None
    ) -> tuple[list[int], list[bool], bool]:
        """Ids, the tokens that overlap with blocks of `turns`, and whether one of them begins before its block."""
        text, spans = self.template(tools).render_spans(messages, tools=tools)
        spans = self._spans_of(messages, turns, tools, spans)
        ids, offsets = self.rendered(text), self.tokenizer.offsets(text)
        skipped = len(offsets) - len(ids)  # a second BOS
        mask, merged = [False] * len(ids), False
        tokens, place = range(skipped, len(offsets)), 0
        for start, stop in spans:
            # Bytes of a character may have no width but for the last one, which comes after them.
            place = bisect.bisect_left(
                tokens, True, place, key=lambda token: offsets[token][0] >= start or offsets[token][1] > start
            )
            merged |= place < len(ids) and offsets[tokens[place]][0] < start
            end = bisect.bisect_left(tokens, True, place, key=lambda token: offsets[token][0] >= stop)
            mask[place:end] = [True] * (end - place)
            place = end
        if not any(mask):
            raise RowError("no target", "the chat template's {% generation %} blocks mark no text of this chat")
        if messages[-1]["role"] == "assistant":
            last = len(mask) - mask[::-1].index(True)
            length = max(self._end_of(ids, is_rendered=True), last)
            return ids[:length], mask[:length], merged
        return ids, mask, merged

    def _spans_of(
        self, messages: list[Message], turns: Sequence[int], tools: Tools | None, spans: list[Span]
    ) -> list[Span]:
        """The spans of generation blocks that belong to `turns` of the assistant, of those of the whole chat."""
        speaking = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        if len(turns) == len(speaking):
            return spans
        if len(spans) == len(speaking):
            return [span for turn, span in zip(speaking, spans, strict=True) if turn in turns]

        def blocks_before(turn: int) -> int:
            if turn == len(messages):
                return len(spans)
            spoken = any(message["role"] == "assistant" for message in messages[:turn])
            return len(self.template(tools).render_spans(messages[:turn], tools=tools)[1]) if spoken else 0

        return [span for turn in turns for span in spans[blocks_before(turn) : blocks_before(turn + 1)]]

    def _ends_turns(self, ids: list[int], mask: list[bool]) -> bool:
        """Whether the last targets are an end of turn."""
        last = len(mask) - mask[::-1].index(True)
        return self._end_of(ids[:last], is_rendered=True) > 0

    def _derived_mask(
        self, messages: list[Message], turns: Sequence[int], tools: Tools | None
    ) -> tuple[list[int], list[bool], bool]:
        """Ids, the tokens of `turns` with their ends, and whether a token reaches over such a border."""
        template = self.template(tools)
        whole = template.render(messages, tools=tools)
        ids = self.rendered(whole)
        mask = [False] * len(ids)
        merged = False
        for turn in turns:
            before = template.render(messages[:turn], add_generation_prompt=True, tools=tools)
            after = template.render(messages[: turn + 1], tools=tools)
            for part in (before, after):
                _require_prefix(part, whole, turn + 1)
            opening = self.rendered(before)
            start = common_prefix(opening, ids)
            merged |= start < len(opening)
            stop = common_prefix(self.rendered(after), ids)
            length = self._end_of(ids[start:stop], is_rendered=True)
            if turn + 1 < len(messages):
                mask[start : start + (length or stop - start)] = [True] * (length or stop - start)
                continue
            completion_ids = self.ended(ids[start:], is_rendered=True)
            ids, mask = ids[:start] + completion_ids, mask[:start] + [True] * len(completion_ids)
        return ids, mask, merged

    def ended(self, completion: list[int], *, is_rendered: bool = False) -> list[int]:
        """The completion with exactly one end token: its own one, after which all is dropped, or EOS.

        Args:
            completion: Ids.
            is_rendered: Whether a chat template rendered it, so that any special token at its end counts as the end
                token; in plain text only a stop token does.
        """
        length = self._end_of(completion, is_rendered)
        return completion[:length] if length else [*completion, self.tokenizer.eos_id]

    def _end_of(self, ids: Sequence[int], is_rendered: bool) -> int:
        """Length up to and including the end token among the trailing blanks and special tokens; 0 if there is none.

        Stop tokens are preferred, so that a special token of the answer (the end of a tool call) is not its end.
        """
        stops, special = self.tokenizer.stop_ids, self.tokenizer.special_ids
        ends = {False: 0, True: 0}  # by whether it is a stop token; going backwards, the earliest of each remains
        for place in range(len(ids) - 1, -1, -1):
            if ids[place] in stops or (is_rendered and ids[place] in special):
                ends[ids[place] in stops] = place + 1
            elif not self._is_blank(ids[place]):
                break
        return ends[True] or ends[False]

    def _is_blank(self, token: int) -> bool:
        if token not in self._blank:
            self._blank[token] = not self.tokenizer.decode([token]).strip()
        return self._blank[token]

    def _split(self, prompt: list[int], wholes: list[list[int]], *, is_rendered: bool = False) -> Split:
        border = min(common_prefix(prompt, whole) for whole in wholes)
        completions = [self.ended(whole[border:], is_rendered=is_rendered) for whole in wholes]
        return Split(prompt[:border], completions, merged=border < len(prompt))


def stop_ids(tokenizer: TokenizerBase) -> frozenset[int]:
    """Stop ids of generation: those of the tokenizer, and the end of turn of its chat template."""
    if tokenizer.chat_template is None:
        return tokenizer.stop_ids
    probe = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    try:
        answer = Encoder(tokenizer).split_chat([probe[0]], [probe[1]]).completions[0]
    except (RowError, DataError):  # a template for other chats, or none; the declared ids remain
        return tokenizer.stop_ids
    return tokenizer.stop_ids | {answer[-1]}


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    if left == right[: len(left)]:
        return len(left)
    shared = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        shared += 1
    return shared


def _require_prefix(part: str, whole: str, turn: int | None = None) -> None:
    if whole.startswith(part):
        return
    message = "the answer" if turn is None else f"message {turn}"
    raise RowError(
        "template",
        f"the chat template renders earlier text differently once {message} is complete, so the answer cannot be split "
        f"from its prompt; use a template whose earlier text does not change"
        + ("" if turn is None else ", one with {% generation %} blocks, or objective.loss_on='last_assistant'"),
    )
