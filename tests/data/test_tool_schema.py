"""JSON schemas of functions: those of transformers, and what cannot be one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nnxdsl.data.environments.tool_schema import tool_schema
from tests.reference.tool_functions import FUNCTIONS

SCHEMAS = json.loads((Path(__file__).parents[1] / "reference" / "tool_schemas.json").read_text())["schemas"]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_it_is_that_of_transformers(function: Callable[..., Any]) -> None:
    assert tool_schema(function) == SCHEMAS[function.__name__]


def test_descriptions_of_parameters_may_be_missing() -> None:
    def check(place: str) -> None:
        """Finds."""

    parameters = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    schema = {"name": "check", "description": "Finds.", "parameters": parameters, "return": {"type": "null"}}
    assert tool_schema(check) == {"type": "function", "function": schema}


def test_what_has_no_schema_is_told() -> None:
    def silent(a: int) -> None: ...

    def untyped(a) -> None:
        """Does."""

    def other(a: Path) -> None:
        """Does."""

    def rest(*a: int) -> None:
        """Does."""

    for function, message in (
        (silent, "'silent' has no docstring; its first lines tell the model what it does"),
        (untyped, "'untyped': the parameter 'a' has no type hint"),
        (other, r"'other': the parameter 'a' has the type <class 'pathlib\.\w+'>; of JSON are str, int"),
        (rest, r"'rest': a model names its arguments, so '\*a' cannot be given"),
    ):
        with pytest.raises(ValueError, match=message):
            tool_schema(function)
