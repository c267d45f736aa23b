"""The random experiments of these tests reach every class, so that no law holds for want of examples."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st

from nnxdsl import Experiment, Spec, to_json
from nnxdsl.spec.base import is_family, registry

TAGS = sorted(
    {cls.tag for cls in registry.values() if not is_family(cls)} | {"my_lab.simpo:SimPO", "my_lab.simpo:Mixture"}
)


@pytest.mark.parametrize("tag", TAGS)
def test_every_class_is_drawn(tag: str) -> None:
    quick = settings(max_examples=2000, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    found: Spec = find(
        st.from_type(Experiment), lambda experiment: f'"type": "{tag}"' in to_json(experiment), settings=quick
    )
    assert f'"type": "{tag}"' in to_json(found)
