"""Where a run's first parameters come from. Reading them is `nnxdsl/models/hub.py` and `nnxdsl/program/initial.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.spec.base import Spec
from nnxdsl.spec.limits import filled

if TYPE_CHECKING:
    from nnxdsl.spec import weights as members
    from nnxdsl.spec.experiment import Experiment


@attrs.frozen(kw_only=True)
class Weights(Spec):
    """The parameters that training starts from."""

    Random: ClassVar[type[members.Random]]
    HF: ClassVar[type[members.HF]]
    Checkpoint: ClassVar[type[members.Checkpoint]]
    From: ClassVar[type[members.From]]
    PEFT: ClassVar[type[members.PEFT]]


@attrs.frozen(kw_only=True)
class Random(Weights):
    """Drawn from the experiment's seed."""


@attrs.frozen(kw_only=True)
class HF(Weights):
    """A directory in the format of the Hugging Face Hub: `config.json` and safetensors, one file or many.

    Attributes:
        path: The directory, or a repository's name on the Hub (`google/gemma-3-1b-it`), which is downloaded.
    """

    path: str = attrs.field(kw_only=False, validator=filled)


@attrs.frozen(kw_only=True)
class Checkpoint(Weights):
    """What an earlier run saved; an adapter is merged into its base, but where another adapter goes on with it.

    Attributes:
        path: The run's directory (its newest good checkpoint is used), or one step of it:
            `runs/NAME-ID/checkpoints/STEP`.
    """

    path: str = attrs.field(kw_only=False, validator=filled)


@attrs.frozen(kw_only=True)
class From(Weights):
    """What another experiment ends with; it is run first if it has not been, and reused if it has.

    Attributes:
        experiment: The experiment to start from.
    """

    experiment: Experiment = attrs.field(kw_only=False)


@attrs.frozen(kw_only=True)
class PEFT(Weights):
    """An adapter in PEFT's format, for `Adapter.LoRA(start=...)`; it is no model by itself.

    Attributes:
        path: The directory, with `adapter_config.json` and `adapter_model.safetensors`.
    """

    path: str = attrs.field(kw_only=False, validator=filled)
