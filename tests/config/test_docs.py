"""Every public field is documented in its class, and doctests pass."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import attrs
import pytest

import nnxdsl.config
from nnxdsl import Objective, Spec
from nnxdsl.config.core.base import declared, registry
from nnxdsl.config.core.docstrings import field_docs, summary

MODULES = [module.name for module in pkgutil.walk_packages(nnxdsl.config.__path__, "nnxdsl.config.")]
SHOWN = {
    "nnxdsl.config.core.docstrings",
    "nnxdsl.config.objectives.environment",
    "nnxdsl.config.objectives.reward",
    "nnxdsl.config.sweep",
}


@pytest.mark.parametrize("name", registry)
def test_every_field_is_described(name: str) -> None:
    cls = registry[name]
    docs = field_docs(cls)
    assert list(docs) == list(declared(cls))
    assert all(text.endswith((".", ")", "`")) and not text[0].islower() for text in docs.values())
    assert summary(cls).endswith(".")


@pytest.mark.parametrize("name", registry)
def test_nothing_is_described_that_is_not_there(name: str) -> None:
    documented = inspect.getdoc(registry[name]) or ""
    _, _, section = documented.partition("Attributes:\n")
    items = [line for line in section.splitlines() if line.startswith("    ") and line[4:5].strip()]
    members = [cls for cls in registry.values() if issubclass(cls, registry[name])]  # a family describes theirs
    assert {item.strip().partition(":")[0] for item in items} <= {field for cls in members for field in declared(cls)}


def test_inherited_fields_have_the_text_of_the_nearest_class() -> None:
    @attrs.frozen(kw_only=True)
    class Twice(type(Objective.DPO())):  # type: ignore[misc]
        """A member below a member.

        Attributes:
            beta: Another text
                over two lines.
        """

        gamma: float = 1.0

    assert field_docs(Twice) == {
        "beta": "Another text over two lines.",
        "label_smoothing": "Assumed fraction of pairs whose labels are swapped.",
        "divergence": "How the distance from the reference is measured.",
        "ld_alpha": "What a token counts beyond the length of the pair's shorter completion.",
        "weighting": '"wpo" weighs pairs by how likely the policy finds their completions, see above.',
        "mtp_loss_weight": field_docs(Objective.SFT)["mtp_loss_weight"],
    }
    assert field_docs(Spec) == {}


@pytest.mark.parametrize("module", MODULES)
def test_doctests(module: str) -> None:
    done = doctest.testmod(importlib.import_module(module), raise_on_error=False)
    assert done.failed == 0
    assert (done.attempted > 0) == (module in SHOWN)
