"""Chats as text: jinja2 templates in a sandbox."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
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
from nnxdsl.data.tokenizers.messages import Message, Tools
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
        variables = {"messages": list(messages), **self.arguments, "add_generation_prompt": False, **variables}
        if self._last is None or self._last[0] != variables:  # a chat is encoded, then checked
            try:
                self._last = variables, self._template.render(**variables, **self._tokens)
            except Exception as error:  # templates may raise anything
                what = str(error) or type(error).__name__
                raise RowError("template", f"the chat template cannot render this chat: {what}") from error
        return self._last[1]


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


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
