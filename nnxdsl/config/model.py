"""Models: architecture, initial weights, tokenizer; `nnxdsl/models/` implements the architectures."""

# ruff: noqa: RUF009 - specs cannot change, so a default may be shared

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

from nnxdsl.config.core.base import BROKEN, Spec, declared, gather
from nnxdsl.config.core.validators import Limit, filled
from nnxdsl.config.tokenizer import Auto, Tokenizer
from nnxdsl.config.weights import PEFT, From, Random, Weights, parts
from nnxdsl.errors import Problem, SpecError

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment
    from nnxdsl.models.families import ModelMembers
else:
    ModelMembers = object

IndexerStage = Literal["sparse", "dense_warmup"]
# What only training reads, and its values where it has no effect.
_TRAINING: Mapping[str, Any] = {
    "router_aux_loss_coef": 0.0,
    "mtp_layers": 0,
    "indexer_loss_coef": 0.0,
    "indexer_stage": "sparse",
}


@attrs.frozen(kw_only=True)
class Model(Spec, ModelMembers):
    """A language model: its architecture, its first weights and its tokenizer.

    `Model("google/gemma-3-1b-it")`, with the name of a repository of the Hub or a directory in its format, is
    `Model.HF` of that: architecture, weights and tokenizer at once.

    Attributes:
        weights: Where the first parameters come from.
        tokenizer: The tokenizer.
        router_aux_loss_coef: Strength of the load-balancing loss of routers (Fedus et al. 2021, arXiv:2101.03961, eq.
            4), which is added to the loss in training; 0 for none. Published configurations have 0.001 to 0.02.
        mtp_layers: Layers behind the decoder that predict tokens further ahead (arXiv:2412.19437, section 2.2): 0, or 1
            of those that the published network has. `mtp_loss_weight` of the objective trains it; else it stays as it
            is, and is exported with the rest.
        indexer_loss_coef: Strength of the loss that trains the indexers of sparse attention (DeepSeek-V3.2,
            arXiv:2512.02556, section 2.1.1): the KL divergence from each layer's own attention, a mean over tokens and
            layers. It is added to the loss in training, and trains nothing else. 0: indexers stay as they are.
        indexer_stage: "sparse": attention is to the tokens that the indexer selects, and all is trained;
            "dense_warmup": attention is to all tokens, and the indexers alone are trained, from a model that had none.
    """

    default_member: ClassVar[str] = "HF"
    router_aux_loss_coef: ClassVar[float] = 0.0
    """Strength of the load-balancing loss of routers."""
    mtp_layers: ClassVar[int] = 0
    """Multi-token prediction (MTP) layers."""
    indexer_loss_coef: ClassVar[float] = 0.0
    """Strength of the loss of indexers."""
    indexer_stage: ClassVar[IndexerStage] = "sparse"
    """What is trained of a model with indexers, and what attention is to."""

    weights: Weights = Random()
    tokenizer: Tokenizer = Auto()

    if TYPE_CHECKING:

        def __init__(self, path: str, *, weights: Weights = ..., tokenizer: Tokenizer = ...) -> None: ...
    else:

        def __new__(cls, *path: str, **fields: object) -> Model:
            """An object of the class, whose `__init__` fills it; `Model` itself with a path is `Model.HF`."""
            return object.__new__(HF if cls is Model and (path or "path" in fields) else cls)

    @classmethod
    def hint_for(cls, value: object) -> str:
        """A text is a repository or a directory of `Model.HF`, or is meant to be one of the members."""
        hint = super().hint_for(value)
        if not hint or not isinstance(value, str):
            return hint
        return f"; write Model({value!r}) for a directory or a repository of the Hub{hint.replace('; ', ', or ', 1)}"

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """Its weights are those of such a model, and its routers are not in a pipeline."""
        return gather(
            lambda: self.check_earlier("model"),
            self._check_mtp,
            self._check_adapter,
            lambda: self._check_router(experiment),
            lambda: self._check_indexer(experiment),
            lambda: self._check_warmup(experiment),
        )

    def check_earlier(self, path: str) -> Iterable[Problem]:
        """Other experiments that give its weights have a model of the same family and size.

        Args:
            path: Where the model is in the experiment, for messages.
        """
        for weights in parts(self.weights):
            if isinstance(weights, From) and weights.experiment.model.network != self.network:
                message = f"is another network than that of {path}.weights.experiment; both must be of one family "
                yield Problem(path, message + "and size")

    @property
    def network(self) -> Model:
        """The model without its weights and tokenizer, and without what only its training reads."""
        training = {name: value for name, value in _TRAINING.items() if name in declared(type(self))}
        return attrs.evolve(self, weights=Random(), tokenizer=Auto(), **training)

    def _check_mtp(self) -> Iterable[Problem]:
        for weights in parts(self.weights)[:1]:  # of what is merged, the base has the layer
            if self.mtp_layers and isinstance(weights, From) and not weights.experiment.model.mtp_layers:
                message = "model.weights.experiment ends without that layer; set 1 there, or 0 here"
                yield Problem("model.mtp_layers", message)

    def _check_adapter(self) -> Iterable[Problem]:
        if isinstance(self.weights, PEFT):
            message = (
                "Weights.PEFT is an adapter and no model; continue it with Adapter.LoRA(start=...), or merge it with "
            )
            yield Problem("model.weights", message + "Weights.Merged")

    def _check_router(self, experiment: Experiment) -> Iterable[Problem]:
        if self.router_aux_loss_coef and experiment.mesh.stage > 1:
            message = "router statistics are not available under pipeline parallelism; set 0"
            yield Problem("model.router_aux_loss_coef", message)

    def _check_indexer(self, experiment: Experiment) -> Iterable[Problem]:
        path = "model.indexer_loss_coef"
        if not self.indexer_loss_coef:
            if self.indexer_stage == "dense_warmup":
                yield Problem(path, "is 0, and nothing else is trained in indexer_stage='dense_warmup'; set it above 0")
            return
        if experiment.mesh.stage > 1:
            yield Problem(path, "statistics of indexers are not available under pipeline parallelism; set 0")
        if experiment.adapter is not None:
            name = type(experiment.adapter).__qualname__
            yield Problem(path, f"indexers are trained whole, without {name}; set 0, or adapter=None")

    def _check_warmup(self, experiment: Experiment) -> Iterable[Problem]:
        if self.indexer_stage != "dense_warmup":
            return
        objective, trains = experiment.objective, "indexer_stage='dense_warmup' trains the indexers alone"
        if objective.batch_kind != "sequences" or objective.teacher is not None or experiment.has_reference:
            name = type(objective).__qualname__
            yield Problem("objective", f"{trains}, from texts, and {name} has no effect on them; use Objective.SFT()")
        off = {
            "objective.z_loss": objective.z_loss,
            "objective.mtp_loss_weight": experiment.mtp_loss_weight,
            "model.router_aux_loss_coef": self.router_aux_loss_coef,
        }
        for path in (path for path, value in off.items() if value):
            yield Problem(path, f"has no effect: {trains}; set 0")
        if experiment.quantization is not None:
            name = type(experiment.quantization).__qualname__
            yield Problem("quantization", f"{trains}, which no quantization applies to: {name} has no use; set None")
        if experiment.frozen:
            yield Problem("frozen", f"has no effect: {trains}; leave it empty")


@attrs.frozen(kw_only=True)
class HF(Model):
    """The model of a directory's `config.json`, of any supported family.

    Attributes:
        path: A directory in the format of the Hugging Face Hub, whose `config.json` has the architecture, or the name
            of a repository there.
        weights: Where the first parameters come from; where it is not given, `Weights.HF` of the same directory.
    """

    fields_added_later: ClassVar[frozenset[str]] = frozenset({"mtp_layers", "indexer_loss_coef", "indexer_stage"})
    derived: ClassVar[Mapping[str, str]] = {"weights": "path"}

    path: str = attrs.field(kw_only=False, validator=filled)
    if not TYPE_CHECKING:  # which sees the default of other models, so that it may be left out
        weights: Weights  # no default of the class: it follows from `path`
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    mtp_layers: int = attrs.field(default=0, validator=Limit(at_least=0, at_most=1))
    indexer_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    indexer_stage: IndexerStage = "sparse"

    @classmethod
    def derived_defaults(cls, values: Mapping[str, object]) -> Mapping[str, object]:
        """Weights of the same directory; a wrong path is reported once, by `path`."""
        try:
            return {"weights": Weights.HF(values["path"])}  # type: ignore[arg-type] # checked there
        except (KeyError, SpecError):
            return {"weights": BROKEN}
