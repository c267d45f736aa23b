"""nnxdsl: a post-training run as one typed Python object, compiled into a Flax NNX program.

Importing it loads no jax; `compile` and `load` do when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nnxdsl.spec.adapter import Adapter
from nnxdsl.spec.base import Spec
from nnxdsl.spec.batching import Batching
from nnxdsl.spec.cadence import Checkpoint, Evaluation
from nnxdsl.spec.data import BadRows, Data, Order
from nnxdsl.spec.distill import Distance
from nnxdsl.spec.divergence import Divergence
from nnxdsl.spec.errors import DataError, NnxdslError, PlanError, Problem, RunError, SpecError, WeightsError
from nnxdsl.spec.experiment import Experiment
from nnxdsl.spec.guard import Guard
from nnxdsl.spec.imports import allow_imports
from nnxdsl.spec.launcher import Launcher
from nnxdsl.spec.model import Model
from nnxdsl.spec.objective import Objective
from nnxdsl.spec.optimizer import Optimizer
from nnxdsl.spec.outer import Outer
from nnxdsl.spec.placement import Memory, Mesh
from nnxdsl.spec.precision import Precision
from nnxdsl.spec.quantization import Quantization
from nnxdsl.spec.reference import Reference
from nnxdsl.spec.reward import Reward, reward
from nnxdsl.spec.schedule import Schedule
from nnxdsl.spec.search import Pruner, Range, Search
from nnxdsl.spec.source import to_python
from nnxdsl.spec.sweep import Sweep, cross, product, zipped
from nnxdsl.spec.tokenizer import Tokenizer
from nnxdsl.spec.tree import diff, evolve, flatten, from_dict, from_json, get, to_dict, to_json
from nnxdsl.spec.weights import Weights

if TYPE_CHECKING:
    from nnxdsl.program.compiler import Program as Program
    from nnxdsl.program.compiler import compile as compile
    from nnxdsl.run.pretrained import Pretrained as Pretrained
    from nnxdsl.run.pretrained import load as load

_NEEDS_JAX = {
    "Pretrained": "nnxdsl.run.pretrained",
    "Program": "nnxdsl.program.compiler",
    "compile": "nnxdsl.program.compiler",
    "load": "nnxdsl.run.pretrained",
}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_JAX:
        return getattr(importlib.import_module(_NEEDS_JAX[name]), name)
    raise AttributeError(f"module 'nnxdsl' has no attribute {name!r}")


__all__ = [
    "Adapter",
    "BadRows",
    "Batching",
    "Checkpoint",
    "Data",
    "DataError",
    "Distance",
    "Divergence",
    "Evaluation",
    "Experiment",
    "Guard",
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
    "RunError",
    "Schedule",
    "Search",
    "Spec",
    "SpecError",
    "Sweep",
    "Tokenizer",
    "Weights",
    "WeightsError",
    "allow_imports",
    "cross",
    "diff",
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
    "zipped",
]
