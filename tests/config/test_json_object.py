"""Fields of plain JSON values: unchanged, equal if their JSON is, refused if they cannot be written."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from nnxdsl import Data, SpecError
from nnxdsl.config.core.codegen import to_python
from nnxdsl.config.core.json_object import JsonObject
from nnxdsl.config.core.run_id import canonical
from nnxdsl.config.core.serialization import diff, evolve, from_json, to_json

VALUES = {"enable_thinking": False, "effort": "low", "documents": [1, {"a": None}], "share": 0.5}


def data(values: Any) -> Data:
    return Data.Conversations("rows.jsonl", template_args=values)


def test_values_go_through_json_and_back() -> None:
    held = data(VALUES)
    assert dict(held.template_args) == VALUES
    assert isinstance(held.template_args, JsonObject)
    assert from_json(to_json(held), Data) == held == copy.deepcopy(held)
    assert evolve(data({}), diff(data({}), held)) == held
    assert evolve(held, {"template_args": {"a": 1}}) == data({"a": 1})
    assert '"enable_thinking": False' in to_python(held)


@pytest.mark.parametrize(("left", "right"), [(True, 1), (1, 1.0), (0, False), (None, "null"), ([], {}), ("1", 1)])
def test_values_are_equal_where_their_json_is(left: Any, right: Any) -> None:
    assert data({"a": left}) != data({"a": right})
    assert diff(data({"a": left}), data({"a": right})) == {"template_args": {"a": right}}
    assert canonical(data({"a": left})) != canonical(data({"a": right}))


def test_order_and_kind_of_containers_do_not_count() -> None:
    assert data({"a": (1, 2), "b": 1}) == data({"b": 1, "a": [1, 2]})
    assert hash(data({"a": (1, 2), "b": 1})) == hash(data({"b": 1, "a": [1, 2]}))


def test_held_values_cannot_be_changed() -> None:
    fields = {"a": [1]}
    held = data(fields)
    fields["a"].append(2)
    held.template_args["a"].append(3)
    assert held == data({"a": [1]})


def test_an_empty_mapping_is_no_part_of_the_identity() -> None:
    assert canonical(data({})) == canonical(Data.Conversations("rows.jsonl"))
    assert "template_args" not in canonical(data({}))


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ("enable_thinking", "expected a mapping of JSON values, got 'enable_thinking'; write {'name': value}"),
        ({"a": float("nan")}, "['a']: expected a plain JSON value, got nan"),
        ({"a": [{"b": {1, 2}}]}, "['a'][0]['b']: expected a plain JSON value, got {1, 2}"),
        ({1: "a"}, "a name: expected text as name, got 1"),
        ({"a": "\ud800"}, "['a']: expected text that UTF-8 can hold, got '\\ud800'"),
        ({"a": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}, "is nested too deeply; at most 16 levels are read"),
    ],
)
def test_values_that_json_could_not_hold(values: Any, what: str) -> None:
    with pytest.raises(SpecError) as error:
        data(values)
    assert str(error.value).splitlines()[1] == f"  template_args: {what}"
