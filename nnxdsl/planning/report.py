"""The plan of a run as an object that shows itself, on a terminal and in a notebook."""

from __future__ import annotations

import functools
from typing import Any

from nnxdsl.config.experiment import Experiment
from nnxdsl.planning import plan as planner
from nnxdsl.runtime import xla_flags
from nnxdsl.sharding import hardware
from nnxdsl.terminal import html
from nnxdsl.terminal.plan_view import show_plan


class Plan(dict[str, Any]):
    """A plan as JSON values, which `docs/reference/plan_json.md` describes."""

    def __repr__(self) -> str:
        return html.render_text(functools.partial(show_plan, self))

    def _repr_html_(self) -> str:
        return html.render_html(functools.partial(show_plan, self))


def plan(experiment: Experiment, device: str | None = None) -> Plan:
    """The plan of an experiment on its mesh: steps, memory, the sharding of every array; nothing is computed.

    Args:
        experiment: The experiment.
        device: The kind of device ("h200", "v5e", "80GiB"), for a verdict whether it fits and an estimate of its speed;
            None for this machine's platform, without them.

    Raises:
        PlanError: Names everything that is inconsistent.
    """
    target = None if device is None else hardware.device(device)
    return Plan(planner.plan(experiment, xla_flags.platform() if target is None else target.platform, target))
