"""Specs inside attrs classes of other packages."""

from __future__ import annotations

import json

import attrs

from nnxdsl import Data, Experiment, Model, Objective, Optimizer, Schedule
from nnxdsl.config.core.serialization import converter


@attrs.frozen
class Trial:
    """A class of somebody else's that holds specs."""

    experiment: Experiment
    scores: tuple[float, ...]
    objective: Objective


def test_specs_inside_other_classes_go_through_the_same_reader() -> None:
    experiment = Experiment(
        name="inside",
        model=Model.Gemma3("tiny"),
        data=Data.Preferences("pairs.jsonl"),
        objective=Objective.DPO(),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        steps=1,
        batch_size=1,
    )
    trial = Trial(experiment, (0.5, 1.0), Objective.DPO(beta=0.3))
    tree = json.loads(json.dumps(converter().unstructure(trial)))
    assert tree["objective"]["type"] == "DPO"
    assert converter().structure(tree, Trial) == trial
