"""Experiment trackers (TensorBoard, W&B, Trackio, MLflow); `nnxdsl/tracking` writes to them.

A third party adds a tracker with a subclass of `Tracking` for its settings, and one class that is registered with
`@nnxdsl.tracking.open_tracker.register(MyTracking)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import Limit, filled
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.recording import tracking as members

project_name = Limit(
    pattern=r"[^/\\#?%:\s][^/\\#?%:]{0,127}", description="a name of up to 128 characters without /\\#?%:"
)
"""A name that W&B and Trackio accept for a project."""

_PASSWORD = re.compile(r"\w+://[^/@]*:[^/@]+@")


@attrs.frozen(kw_only=True)
class Tracking(Spec):
    """An experiment tracker. Changes nothing in what a run computes.

    A process of its own writes them, from `metrics.jsonl`: a tracker that fails is a warning, never the end of a run.
    """

    library: ClassVar[str] = ""
    """The package that the tracker imports; empty where it needs none."""
    extra: ClassVar[str] = ""
    """The extra of nnxdsl that installs it; empty for a tracker of a third party."""

    TensorBoard: ClassVar[type[members.TensorBoard]]
    WandB: ClassVar[type[members.WandB]]
    Trackio: ClassVar[type[members.Trackio]]
    MLflow: ClassVar[type[members.MLflow]]


@attrs.frozen(kw_only=True)
class TensorBoard(Tracking):
    """Event files for `tensorboard --logdir DIRECTORY` (the extra `tensorboard`).

    Attributes:
        directory: Each run writes to a directory of its id in it. Relative to the working directory.
    """

    library: ClassVar[str] = "tensorboard"
    extra: ClassVar[str] = "tensorboard"

    directory: str = attrs.field(validator=filled, kw_only=False)


@attrs.frozen(kw_only=True)
class WandB(Tracking):
    """A run of Weights & Biases (the extra `wandb`).

    Attributes:
        project: Project.
        mode: "offline" writes to the run directory alone, for `wandb sync`; "online" needs `wandb login` or
            WANDB_API_KEY.
        entity: User or team; None for the default one.
    """

    library: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"

    project: str = attrs.field(validator=project_name, kw_only=False)
    mode: Literal["online", "offline"] = "online"
    entity: str | None = attrs.field(default=None, validator=filled)


@attrs.frozen(kw_only=True)
class Trackio(Tracking):
    """A run of Trackio (the extra `trackio`).

    Attributes:
        project: Project.
        space: Space of Hugging Face, such as "user/name", which needs a token; None for this machine's own database,
            which `trackio show` reads.
    """

    library: ClassVar[str] = "trackio"
    extra: ClassVar[str] = "trackio"

    project: str = attrs.field(validator=project_name, kw_only=False)
    space: str | None = attrs.field(default=None, validator=filled)


@attrs.frozen(kw_only=True)
class MLflow(Tracking):
    """A run of MLflow (the extra `mlflow`).

    Attributes:
        uri: Tracking server ("https://..."), or a database ("sqlite:///mlflow.db").
        experiment: Experiment of MLflow that the run belongs to; made where there is none.
    """

    library: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"

    uri: str = attrs.field(
        validator=Limit(pattern=r"[\w+]+:.+", description="an address such as 'sqlite:///mlflow.db' or 'https://...'"),
        kw_only=False,
    )
    experiment: str = attrs.field(default="nnxdsl", validator=filled)

    def problems(self) -> Iterable[Problem]:
        """A password would be written to `experiment.json`."""
        if _PASSWORD.match(self.uri):
            message = "holds a password, which the run directory would show; use MLFLOW_TRACKING_USERNAME and _PASSWORD"
            yield Problem("uri", message)
