"""A teacher's own experiment: where its weights and its tokenizer come from is asked as of any other model."""

from __future__ import annotations

from nnxdsl.config.experiment import Experiment
from nnxdsl.config.objectives.distillation import Distill
from nnxdsl.config.objectives.sft import SFT
from nnxdsl.config.optimizer import SGD
from nnxdsl.config.precision import Precision
from nnxdsl.config.schedule import Constant


def teacher_of(experiment: Experiment) -> Experiment | None:
    """An experiment that starts from the teacher's weights, on one device; None where there is no teacher."""
    objective = experiment.objective
    if not isinstance(objective, Distill):
        return None
    return Experiment(
        name=experiment.name,
        model=objective.teacher,
        data=experiment.data,
        objective=SFT(loss_on=objective.loss_on),
        optimizer=SGD(schedule=Constant(lr=1.0)),
        steps=1,
        batch_size=1,
        seed=experiment.seed,
        precision=Precision(compute=experiment.precision.compute),
    )
