"""nnxdsl: a post-training run as one typed Python object, compiled into a Flax NNX program.

Importing it loads no jax; `compile` and `load` do when they are first used. `save_rows` loads numpy. It adds to
`XLA_FLAGS` what keeps the installed version of XLA from ending the process.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnxdsl.config.adapter import Adapter
from nnxdsl.config.batching import Batching
from nnxdsl.config.core.base import Spec, register_html
from nnxdsl.config.core.codegen import to_python
from nnxdsl.config.core.imports import allow_imports
from nnxdsl.config.core.serialization import diff, evolve, flatten, from_dict, from_json, get, to_dict, to_json
from nnxdsl.config.data import BadRows, Data, Order
from nnxdsl.config.diloco import Outer
from nnxdsl.config.evaluation import Evaluation
from nnxdsl.config.experiment import Experiment, register_runners
from nnxdsl.config.launcher import Launcher
from nnxdsl.config.memory import Memory
from nnxdsl.config.model import Model
from nnxdsl.config.objectives.adaptive_entropy import AdaptiveEntropy
from nnxdsl.config.objectives.base import Objective
from nnxdsl.config.objectives.distillation import Distance
from nnxdsl.config.objectives.divergence import Divergence
from nnxdsl.config.objectives.engine import Engine
from nnxdsl.config.objectives.environment import Environment, environment, tools
from nnxdsl.config.objectives.importance_sampling import ImportanceSampling
from nnxdsl.config.objectives.reference import Reference
from nnxdsl.config.objectives.reward import Reward, reward
from nnxdsl.config.objectives.teacher_server import TeacherServer
from nnxdsl.config.optimizer import Optimizer
from nnxdsl.config.precision import Precision
from nnxdsl.config.quantization import Quantization
from nnxdsl.config.recording.checkpointing import Checkpoint
from nnxdsl.config.recording.rollouts import RolloutLog
from nnxdsl.config.recording.tracking import Tracking
from nnxdsl.config.schedule import Schedule
from nnxdsl.config.search import Pruner, Range, Search
from nnxdsl.config.sharding import Mesh
from nnxdsl.config.step_guard import Guard
from nnxdsl.config.sweep import Sweep, cross, product, register_runner, zipped
from nnxdsl.config.tokenizer import Tokenizer
from nnxdsl.config.weights import Weights
from nnxdsl.errors import DataError, NnxdslError, PlanError, Problem, RunError, SpecError, WeightsError
from nnxdsl.models import families as _families  # noqa: F401 - registers Model.Gemma3 and the others
from nnxdsl.runtime import xla_faults

if TYPE_CHECKING:
    from nnxdsl.data.sources.in_memory import save_rows as save_rows
    from nnxdsl.generate.pretrained import Pretrained as Pretrained
    from nnxdsl.generate.pretrained import load as load
    from nnxdsl.planning.report import Plan as Plan
    from nnxdsl.planning.report import plan as plan
    from nnxdsl.program.compile import Program as Program
    from nnxdsl.program.compile import compile as compile
    from nnxdsl.runs.frame import list_runs as list_runs
    from nnxdsl.trainer.result import Result as Result
    from nnxdsl.trainer.sweep_result import SweepResult as SweepResult

_LAZY = {
    "Plan": "nnxdsl.planning.report",
    "Pretrained": "nnxdsl.generate.pretrained",
    "Program": "nnxdsl.program.compile",
    "Result": "nnxdsl.trainer.result",
    "SweepResult": "nnxdsl.trainer.sweep_result",
    "compile": "nnxdsl.program.compile",
    "list_runs": "nnxdsl.runs.frame",
    "load": "nnxdsl.generate.pretrained",
    "plan": "nnxdsl.planning.report",
    "save_rows": "nnxdsl.data.sources.in_memory",
}


def _command_line(experiment: Experiment) -> int:
    return importlib.import_module("nnxdsl.cli").main_of(experiment)


def _html(spec: Spec) -> str:
    return importlib.import_module("nnxdsl.config.core.tree_html").page(spec)


def _run(experiment: Experiment, home: Path, **options: bool) -> Result:
    return importlib.import_module("nnxdsl.trainer.result").run_experiment(experiment, home, **options)


def _run_sweep(*arguments: Any, **options: bool) -> SweepResult:
    return importlib.import_module("nnxdsl.trainer.sweep_result").run_sweep(*arguments, **options)


xla_faults.set_flags()
register_html(_html)
register_runners(_command_line, _run)
register_runner(_run_sweep)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'nnxdsl' has no attribute {name!r}")


__all__ = [
    "Adapter",
    "AdaptiveEntropy",
    "BadRows",
    "Batching",
    "Checkpoint",
    "Data",
    "DataError",
    "Distance",
    "Divergence",
    "Engine",
    "Environment",
    "Evaluation",
    "Experiment",
    "Guard",
    "ImportanceSampling",
    "Launcher",
    "Memory",
    "Mesh",
    "Model",
    "NnxdslError",
    "Objective",
    "Optimizer",
    "Order",
    "Outer",
    "PlanError",
    "Precision",
    "Problem",
    "Pruner",
    "Quantization",
    "Range",
    "Reference",
    "Reward",
    "RolloutLog",
    "RunError",
    "Schedule",
    "Search",
    "Spec",
    "SpecError",
    "Sweep",
    "TeacherServer",
    "Tokenizer",
    "Tracking",
    "Weights",
    "WeightsError",
    "allow_imports",
    "cross",
    "diff",
    "environment",
    "evolve",
    "flatten",
    "from_dict",
    "from_json",
    "get",
    "product",
    "reward",
    "to_dict",
    "to_json",
    "to_python",
    "tools",
    "zipped",
]
