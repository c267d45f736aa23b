"""Chats as text: jinja2 templates in a sandbox."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

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

TODAY = datetime.datetime(2024, 7, 26)
"""The date of `strftime_now` in templates, fixed so that tokens do not depend on the day."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, which marks answers in Hub templates, without effect."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as a plain class attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """A chat template that turns messages into the text a model was trained on.

    Args:
        source: jinja2 source, as in the `chat_template` of a Hub directory.
        bos_token: Text of the token that opens a sequence, "" if there is none.
        eos_token: Text of the token that ends one.

    Raises:
        DataError: The source is not valid jinja2.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            place = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise DataError(f"chat template: no valid jinja2{place}: {error.message}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        # A compiled template cannot be pickled; worker processes compile it again.
        return functools.partial(ChatTemplate, self.source, **self._tokens), ()

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, tools: Tools | None = None
    ) -> str:
        """The chat as text, as by `apply_chat_template` of transformers.

        Raises:
            RowError: The template raises an exception.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, tools=tools, **self._tokens
            )
        except Exception as error:  # templates may raise anything
            what = str(error) or type(error).__name__
            raise RowError("template", f"the chat template cannot render this chat: {what}") from error


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


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
