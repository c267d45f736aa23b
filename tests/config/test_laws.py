"""Properties of every valid experiment."""

from __future__ import annotations

import copy
import json
import pickle  # noqa: TID251 - of objects that this test made itself
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nnxdsl
from nnxdsl import (
    Experiment,
    Objective,
    diff,
    evolve,
    flatten,
    from_dict,
    from_json,
    get,
    to_dict,
    to_json,
    to_python,
)
from nnxdsl.config.core.base import registry
from nnxdsl.config.core.codegen import parse_value, render
from nnxdsl.config.core.run_id import canonical, fingerprint

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]  # most combinations of objective and data are refused
LAW = settings(deadline=None, max_examples=25, derandomize=True, suppress_health_check=SLOW)
ANY = st.from_type(Experiment)
OUTSIDE = {"name", "notes", "evaluation", "checkpoint", "rollouts", "tracking", "mesh", "microbatch_size", "memory"}
SPECS = {"my_lab": sys.modules["my_lab.simpo"], **vars(nnxdsl), **vars(sys.modules["my_lab.simpo"])}


def inside(path: str) -> bool:
    """Whether a path belongs to the mathematics of a run; an earlier stage counts by its own identity."""
    return path.replace("model.weights.experiment.", "").split(".")[0] not in OUTSIDE


@LAW
@given(ANY)
def test_json_gives_the_same_object_back(experiment: Experiment) -> None:
    assert from_dict(json.loads(json.dumps(to_dict(experiment)))) == experiment
    assert from_json(to_json(experiment), Experiment) == experiment


@LAW
@given(st.data())
def test_parts_alone_give_the_same_object_back(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from([cls for cls in registry.values() if cls.family is cls]))
    part = data.draw(st.from_type(family))
    assert from_dict(json.loads(json.dumps(to_dict(part))), expected=family) == part
    assert eval(repr(part), dict(SPECS)) == part
    assert eval(render(part), dict(SPECS)) == part
    if "SimPO" not in repr(part) and "Mixture" not in repr(part):  # the command line knows built-in names alone
        assert parse_value(render(part)) == part


@pytest.mark.extended
@LAW
@given(ANY, ANY)
def test_evolving_by_the_difference_gives_the_other(left: Experiment, right: Experiment) -> None:
    changes = diff(left, right)
    assert evolve(left, changes) == right
    assert to_json(evolve(left, changes)) == to_json(right)
    assert diff(right, evolve(left, changes)) == {}


@pytest.mark.extended
@LAW
@given(ANY, ANY)
def test_equal_if_and_only_if_same_json(left: Experiment, right: Experiment) -> None:
    for one, other in ((left, right), (left, from_dict(to_dict(left)))):
        assert (one == other) == (to_json(one) == to_json(other)) == (diff(one, other) == {})
        if one == other:
            assert hash(one) == hash(other)


@pytest.mark.extended
@LAW
@given(ANY, ANY)
def test_same_identity_if_and_only_if_same_mathematics(left: Experiment, right: Experiment) -> None:
    placed = evolve(left, {path: value for path, value in diff(left, right).items() if path in ("name", "notes")})
    for one, other in ((left, right), (left, placed)):
        before, after = flatten(one), flatten(other)
        changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        same = not any(inside(path) for path in changed)
        assert (canonical(one) == canonical(other)) == same
        assert (fingerprint(one) == fingerprint(other)) == same


@pytest.mark.extended
@LAW
@given(ANY)
def test_generated_python_builds_an_equal_object(experiment: Experiment) -> None:
    space: dict[str, object] = {"__name__": "generated"}
    exec(compile(to_python(experiment), "experiment.py", "exec"), space)
    assert space["experiment"] == experiment
    assert eval(repr(experiment), dict(SPECS)) == experiment


def test_every_class_is_found_by_pickle() -> None:
    for cls in registry.values():
        assert pickle.loads(pickle.dumps(cls)) is cls


@pytest.mark.extended
@LAW
@given(ANY)
def test_copies_and_pickles_are_equal(experiment: Experiment) -> None:
    for other in (pickle.loads(pickle.dumps(experiment)), copy.deepcopy(experiment), copy.copy(experiment)):
        assert other == experiment
        assert hash(other) == hash(experiment)


@pytest.mark.extended
@LAW
@given(ANY)
def test_every_leaf_has_a_path_that_reads_and_writes_it(experiment: Experiment) -> None:
    leaves = {path: value for path, value in flatten(experiment).items() if path.rpartition(".")[2] != "type"}
    assert {path: get(experiment, path) for path in leaves} == leaves
    for path, value in leaves.items():
        assert evolve(experiment, {path: value}) == experiment


def test_integers_become_the_floats_that_they_equal() -> None:
    one, other = Objective.DPO(beta=1), Objective.DPO(beta=1.0)
    assert type(one.beta) is float
    assert one == other
    assert hash(one) == hash(other)
    assert to_json(one) == to_json(other)
    assert fingerprint(one) == fingerprint(other)


def test_the_two_zeros_are_one() -> None:
    one, other = Objective.DPO(label_smoothing=-0.0), Objective.DPO(label_smoothing=0.0)
    assert to_json(one) == to_json(other)
