"""The random experiments of these tests reach every class."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from my_lab import simpo

from nnxdsl import Experiment, Spec, to_json
from nnxdsl.config.core.base import is_family, registry

QUICK = settings(max_examples=2000, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
CLASSES = {cls.tag: cls for cls in (*registry.values(), simpo.SimPO, simpo.Mixture) if not is_family(cls)}
OUTSIDE = {"Launcher", "Range", "Pruner"}
"""Families of what stands beside an experiment: where it is started, what is searched."""
FAMILIES = sorted({cls.family.__name__ for cls in CLASSES.values()} - OUTSIDE)


@pytest.mark.extended
@pytest.mark.parametrize("tag", sorted(CLASSES))
def test_every_class_is_drawn_of_its_family(tag: str) -> None:
    cls = CLASSES[tag]
    assert type(find(st.from_type(cls.family), lambda spec: type(spec) is cls, settings=QUICK)) is cls


RARE = {"Reward", "Distance", "Outer"}
"""Few experiments have one: it takes long to come upon one."""


@pytest.mark.default_variants(6)
@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow) if f in RARE else f for f in FAMILIES])
def test_experiments_hold_every_family(family: str) -> None:
    tags = tuple(f'"type": "{tag}"' for tag, cls in CLASSES.items() if cls.family.__name__ == family)
    actual: Spec = find(
        st.from_type(Experiment), lambda experiment: any(tag in to_json(experiment) for tag in tags), settings=QUICK
    )
    assert to_json(actual)
