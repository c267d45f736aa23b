"""Chats as text: jinja2 templates in a sandbox."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from nnxdsl.config.data import TEMPLATE_VARIABLES
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.messages import Message, Tools, content_of
from nnxdsl.errors import DataError

TURNS = """\
{{ bos_token }}{% for message in messages %}
<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}
{{ message['content'] }}<end_of_turn>
{% endfor %}
{% if add_generation_prompt %}
<start_of_turn>model
{% endif %}
"""
"""The template of the built-in byte tokenizer: that of Gemma, with a system turn."""

ALL_OF_A_TURN = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{{ message['content'] or '' }}{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
"""A template that writes tools and tool calls as well, to look at rows without a model."""

TODAY = datetime.datetime(2024, 7, 26)
"""The date of `strftime_now` in templates, fixed so that tokens do not depend on the day."""


_MARKED = "mark generation"
"""Variable under which generation blocks are marked; no template can name it."""
_MARKS = ("\ufdd0generation<", "\ufdd0generation>")
_PREFILL_END = "\ufdd0continued "
"""Stands at the end of a message that is continued; a template that strips the message takes its blank."""

Span = tuple[int, int]
"""First character of a part of a text, and the one after its last."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, which marks the assistant's text in Hub templates.

    As in transformers, a block is rendered like the body of `{% call %}`, with a scope of its own.
    """

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as a plain class attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_block"), [], [], body).set_lineno(line)

    @jinja2.pass_context
    def _block(self, context: jinja2.runtime.Context, caller: Callable[[], str]) -> str:
        return caller().join(_MARKS) if context.get(_MARKED) else caller()


def template_source(template: str) -> str:
    """The source of a template that is given as source or as a file.

    Raises:
        DataError: It is neither, or the file cannot be read.
    """
    if "{" in template:
        return template
    file = Path(template).expanduser()
    if not file.is_file():
        raise DataError(f"chat_template: {template!r} is neither jinja2 source nor a file")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"chat_template: {file} cannot be read: {error}") from error


class ChatTemplate:
    """A chat template that turns messages into the text a model was trained on.

    Args:
        source: jinja2 source, as in the `chat_template` of a Hub directory.
        bos_token: Text of the token that opens a sequence, "" if there is none.
        eos_token: Text of the token that ends one.
        arguments: Further variables.

    Attributes:
        has_generation: Whether it has `{% generation %}` blocks.

    Raises:
        DataError: The source is not valid jinja2, or does not read one of the arguments.
    """

    def __init__(
        self, source: str, *, bos_token: str, eos_token: str, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.source = source
        self.arguments = dict(arguments or {})
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._last: tuple[dict[str, Any], str] | None = None
        try:
            self.has_generation = any(_is_generation(call) for call in _parsed(source).find_all(jinja2.nodes.CallBlock))
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            place = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise DataError(f"chat template: no valid jinja2{place}: {error.message}") from error
        if self.arguments:
            self._check_arguments()

    def __reduce__(self) -> tuple[Any, ...]:
        # A compiled template cannot be pickled; worker processes compile it again.
        return functools.partial(ChatTemplate, self.source, **self._tokens, arguments=self.arguments), ()

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, tools: Tools | None = None
    ) -> str:
        """The chat as text, as by `apply_chat_template` of transformers.

        Raises:
            RowError: The template raises an exception.
        """
        return self._render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    def render_prompt(self, messages: Sequence[Message], *, tools: Tools | None = None) -> str:
        """The chat as text up to where an answer begins: after the generation prompt.

        If the last message is the assistant's, it is the beginning of the answer (a prefill), and the text ends with
        it, as with `continue_final_message` of transformers.

        Raises:
            RowError: The template raises an exception, or the last message cannot be continued.
        """
        if messages[-1]["role"] != "assistant":
            return self._render(messages, add_generation_prompt=True, tools=tools)
        if messages[-1].get("tool_calls"):
            raise RowError(
                "no prefill", "the prompt ends with tool calls, which cannot be continued; add their results"
            )
        prefill = content_of(messages[-1])
        last = {**messages[-1], "content": prefill + _PREFILL_END}
        before, mark, after = self._render([*messages[:-1], last], tools=tools).rpartition(_PREFILL_END.rstrip())
        if not mark or prefill.strip() not in before:
            raise RowError("no prefill", "the chat template changes the last message, so it cannot be continued")
        is_stripped = not after.startswith(" ") and prefill.strip()
        return before.rstrip() if is_stripped else before

    def render_spans(self, messages: Sequence[Message], *, tools: Tools | None = None) -> tuple[str, list[Span]]:
        """The chat as text, and the spans of its `{% generation %}` blocks in their order.

        Raises:
            RowError: The template raises an exception, or computes with the text of a block.
        """
        opening, closing = _MARKS
        pieces = re.split(f"({opening}|{closing})", self._render(messages, tools=tools, **{_MARKED: True}))
        text = self._render(messages, tools=tools)
        if pieces[1::2] != [opening, closing] * (len(pieces) // 4) or "".join(pieces[::2]) != text:
            raise RowError("template", "the chat template changes the text of its {% generation %} blocks afterwards")
        spans: list[Span] = []
        place = 0
        for number, piece in enumerate(pieces[::2]):
            if number % 2:
                spans.append((place, place + len(piece)))
            place += len(piece)
        return text, spans

    def _check_arguments(self) -> None:
        """Refuses what the template does not read, or is given anyway."""
        reads = jinja2.meta.find_undeclared_variables(_parsed(self.source)) - set(_environment().globals)
        reads -= set(TEMPLATE_VARIABLES)
        for name in self.arguments:
            if name not in reads:
                names = ", ".join(sorted(reads)) or "no further arguments"
                raise DataError(f"template_args: the chat template does not read {name!r}; it reads {names}")

    def _render(self, messages: Sequence[Message], **variables: Any) -> str:
        messages = [self._with_arguments(message) if "tool_calls" in message else message for message in messages]
        variables = {"messages": messages, **self.arguments, "add_generation_prompt": False, **variables}
        if self._last is None or self._last[0] != variables:  # a chat is encoded, then checked
            self._last = variables, self._rendered(variables)
        return self._last[1]

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(**variables, **self._tokens)
        except Exception as error:  # templates may raise anything
            what = str(error) or type(error).__name__
            raise RowError("template", f"the chat template cannot render this chat: {what}") from error

    def _with_arguments(self, message: Message) -> Message:
        """A message whose tool calls have their arguments in the form that the template reads."""
        if not self._reads_json_text:
            return message
        return {**message, "tool_calls": [_with_json_text(call) for call in message["tool_calls"]]}

    @functools.cached_property
    def _reads_json_text(self) -> bool:
        """Whether it writes arguments of tool calls as they are, and so needs JSON text (DeepSeek's), not an object."""

        def written(arguments: object) -> str:
            call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
            try:
                return self._rendered({"messages": turns, **self.arguments, "add_generation_prompt": False})
            except RowError:
                return ""

        probe = {"a": "b"}
        as_object, as_text = written(probe), written(json.dumps(probe))
        return json.dumps(probe) in as_text and (not as_object or str(probe) in as_object)


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment of Hub templates: trimmed blocks, a few helpers, sandboxed."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    return environment


def _parsed(source: str) -> jinja2.nodes.Template:
    return _environment().parse(source)


def _is_generation(block: jinja2.nodes.CallBlock) -> bool:
    called = block.call.node
    return isinstance(called, jinja2.nodes.ExtensionAttribute) and called.identifier == _Generation.identifier


def _with_json_text(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _with_json_text(call["function"])}
    arguments = call.get("arguments")
    return {**call, "arguments": _to_json(arguments)} if isinstance(arguments, dict) else call


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
