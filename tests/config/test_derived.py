"""Derived weights of `Model.HF`: those of the same directory, with the same run id as if written out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnxdsl import Experiment, Model, SpecError, Weights, WeightsError, diff, evolve, from_dict, load, to_dict
from nnxdsl.config.core.codegen import to_python
from nnxdsl.config.core.serialization import flatten

LLAMA = Path(__file__).parent.parent / "reference" / "families" / "llama3"

models = st.builds(
    lambda path, weights, router_aux_loss_coef: Model.HF(path, router_aux_loss_coef=router_aux_loss_coef, **weights),
    st.sampled_from("ab"),
    st.one_of(
        st.just({}),
        st.sampled_from(
            [Weights.Random(), Weights.HF("a"), Weights.HF("b"), Weights.HF("a", allow_non_finite=True)]
        ).map(lambda weights: {"weights": weights}),
    ),
    st.sampled_from([0.0, 0.1]),
)


def test_it_is_what_is_written_out(design: Callable[..., Experiment]) -> None:
    left, written = (design(model=model) for model in (Model.HF("a"), Model.HF("a", weights=Weights.HF("a"))))
    assert left == written
    assert left.id == written.id
    assert flatten(left)["model.weights.path"] == "a"
    assert 'weights=Weights.HF("a")' in to_python(left)
    tree = to_dict(left.model)
    del tree["weights"]
    assert from_dict(tree, Model) == left.model


def test_a_wrong_path_is_said_once() -> None:
    for path in (3, "", "\ud800"):
        with pytest.raises(SpecError, match=r"^1 problem in Model.HF\n  path: expected "):
            Model.HF(path)  # type: ignore[arg-type]


def test_they_follow_the_path() -> None:
    assert evolve(Model.HF("a"), {"path": "b"}) == Model.HF("b")
    assert evolve(Model.HF("a"), {"router_aux_loss_coef": 0.1}).weights == Weights.HF("a")
    apart = Model.HF("a", weights=Weights.HF("c"))
    assert evolve(apart, {"path": "b"}) == Model.HF("b", weights=Weights.HF("c"))


@given(models, models)
def test_diff_and_evolve(one: Model, other: Model) -> None:
    assert evolve(one, diff(one, other)) == other
    assert from_dict(to_dict(one), Model) == one
    assert attrs.evolve(one) == one


def test_a_directory_without_weights(tmp_path: Path) -> None:
    shutil.copyfile(LLAMA / "config.json", tmp_path / "config.json")
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: expected model.safetensors or model.safetensors.index.json, there is neither; to train a "
        "model from scratch, set weights=Weights.Random()"
    )
