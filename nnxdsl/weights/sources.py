"""Where a run's first weights and its tokenizer are: Hub directories, checkpoints, earlier experiments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.adapters import lora_math, weight_only_quant
from nnxdsl.config.adapter import LowRank, unlike
from nnxdsl.config.core.serialization import evolve, from_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.objectives.reference import Reference
from nnxdsl.config.sharding import Mesh
from nnxdsl.config.tokenizer import Auto
from nnxdsl.config.weights import HF, PEFT, Checkpoint, From, Merged, Weights
from nnxdsl.errors import PlanError, Problem, WeightsError
from nnxdsl.formats import peft
from nnxdsl.formats.finite import all_finite, require_finite
from nnxdsl.formats.hf_download import locate
from nnxdsl.models.params import is_mtp_param
from nnxdsl.program import init
from nnxdsl.program.blueprint import Blueprint, build_blueprint, build_unplaced
from nnxdsl.program.init import ArrayLike, Source, TeacherSource
from nnxdsl.program.teacher import teacher_of
from nnxdsl.runs.checkpoint_format import find
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.storage.jsonl import read_json

PARAMS = "params"
"""The group of a checkpoint that holds weights alone."""


def tokenizer_directory(experiment: Experiment, home: Path) -> Path | None:
    """The directory in which `Tokenizer.Auto` finds the tokenizer of an experiment's weights; None for random ones."""
    match experiment.model.weights:
        case HF(path=path):
            return locate(path)
        case From(experiment=earlier):
            return tokenizer_directory(earlier, home)
        case Merged(base=base):
            return tokenizer_directory(_with_weights(experiment, base), home)
        case Checkpoint(path=path):
            earlier = _experiment_or_none(Path(path))
            return find(Path(path).expanduser())[0].parent if earlier is None else tokenizer_directory(earlier, home)
        case _:
            return None


def tokenizer_owner(experiment: Experiment) -> Experiment:
    """The experiment whose `model.tokenizer` counts: with `Auto` over a checkpoint, that of the run it came from."""
    match experiment.model.weights:
        case From(experiment=earlier) if isinstance(experiment.model.tokenizer, Auto):
            return tokenizer_owner(earlier)
        case Checkpoint(path=path) if isinstance(experiment.model.tokenizer, Auto):
            earlier = _experiment_or_none(Path(path))
            return experiment if earlier is None else tokenizer_owner(earlier)
        case Merged(base=base):
            return tokenizer_owner(_with_weights(experiment, base))
        case _:
            return experiment


def open_source(blueprint: Blueprint, home: Path) -> Source:
    """The source of an experiment's base weights, and of its teacher's or its reference's own, runs included.

    Args:
        blueprint: Of the experiment.
        home: The directory of all runs, where those of earlier experiments are.

    Raises:
        WeightsError: there is no such run, or it is of another network.
        PlanError: tensors of a Hub directory are missing or of another shape.
    """
    own, teacher = _own_source(blueprint, home), teacher_of(blueprint.experiment)
    if blueprint.reference.has_own_weights:
        reference = blueprint.experiment.reference
        assert isinstance(reference, Reference.Checkpoint)
        return init.ReferenceSource(own, _model_source(init.with_weights(blueprint, reference.weights), home))
    return (
        own if teacher is None else TeacherSource(own, _own_source(build_unplaced(teacher, blueprint.platform), home))
    )


def _own_source(blueprint: Blueprint, home: Path) -> Source:
    """As `open_source`, without what a teacher has."""
    experiment = blueprint.experiment
    base = _model_source(blueprint, home)
    match experiment.adapter and experiment.adapter.start:
        case Checkpoint() | From() as place:
            return init.AdapterSource(base, _adapter_of(place, blueprint, home))
        case _:
            return init.with_adapter_start(blueprint, base)


def _model_source(blueprint: Blueprint, home: Path) -> Source:
    """The source of a model's weights, without an adapter that goes on beside them."""
    match blueprint.experiment.model.weights:
        case Checkpoint() as place:
            return checkpoint_source(blueprint, place)
        case From() as place:
            return CheckpointSource(blueprint, place, home)
        case Merged(base=base) as merged:
            inner = attrs.evolve(blueprint, experiment=_with_weights(blueprint.experiment, base))
            return MergedSource(inner, merged, _model_source(inner, home), home)
        case _:
            return init.open_base(blueprint)


def _with_weights(experiment: Experiment, weights: Weights) -> Experiment:
    """The experiment with other first weights."""
    return attrs.evolve(experiment, model=attrs.evolve(experiment.model, weights=weights))


def saved_experiment(path: Path) -> Experiment:
    """The experiment that a run directory, or one of its checkpoints, belongs to."""
    directory, _ = find(path.expanduser())
    file = directory.parent / "experiment.json"
    if not file.is_file():
        raise WeightsError(f"{path}: {file} is missing, so it is not known which experiment saved it")
    return from_dict(read_json(file), Experiment)


def _experiment_or_none(path: Path) -> Experiment | None:
    """The experiment that saved a checkpoint; None for a checkpoint of weights alone, which no run saved."""
    directory, _ = find(path.expanduser())
    is_run = (directory.parent / "experiment.json").is_file() or not (directory.parent / "config.json").is_file()
    return saved_experiment(path) if is_run else None


class CheckpointSource:
    """The weights that a run saved, as weights of the published network: an adapter is merged into its base.

    What comes out is the model that the run ended with: where it kept its base in few bits, the adapter is merged into
    that base, errors of rounding included, since that is what it was trained on. Nothing in the run's directory is
    written or swept.
    """

    def __init__(self, blueprint: Blueprint, place: Checkpoint | From, home: Path) -> None:
        path = _path_of(place, home)
        run = _Trained.open(place, home)
        further = run.blueprint.config.mtp_layers
        if attrs.evolve(run.blueprint.config, mtp_layers=0) != attrs.evolve(blueprint.config, mtp_layers=0):
            raise WeightsError(
                f"{path} holds weights of another network than {type(blueprint.experiment.model).__qualname__}"
            )
        if further < blueprint.config.mtp_layers:
            raise WeightsError(f"{path} holds no layer that predicts further ahead; set model.mtp_layers=0")
        self.experiment, self.step, self._earlier, self._saved = run.experiment, run.step, run.blueprint, run.leaves
        # The earlier run's own earlier runs are beside it, which need not be where this one is.
        beside = run.directory.parent.parent
        self._base = open_source(run.blueprint, beside) if run.blueprint.frozen else None

    def leaf(self, path: str) -> ArrayLike:
        """The weight of one path; float32 where it was trained."""
        if self._base is None or path in self._saved:
            return np.asarray(self._saved[path])
        weight = jnp.asarray(self._base.leaf(path), self._earlier.base[path].dtype)
        quantization = self.experiment.quantization
        if quantization is not None and path not in self._earlier.frozen:
            weight = weight_only_quant.rounded(weight, quantization)
        if path + lora_math.A not in self._saved:
            return weight
        adapter = self.experiment.adapter
        assert isinstance(adapter, LowRank)
        return lora_math.merged(adapter, path, weight, lambda name: np.asarray(self._saved[name]))


@attrs.frozen(eq=False)
class _Trained:
    """What a run had trained at one step.

    Attributes:
        directory: Its checkpoints.
        step: Optimizer steps done.
        experiment: What it was asked for.
        blueprint: Of that, on one device.
        leaves: Its trainable arrays by path, float32, in the host's memory.
    """

    directory: Path
    step: int
    experiment: Experiment
    blueprint: Blueprint
    leaves: Mapping[str, jax.Array]

    @classmethod
    def open(cls, place: Checkpoint | From, home: Path) -> _Trained:
        """Reads the newest good checkpoint of a run, or one step of it.

        Raises:
            WeightsError: there is none, or its experiment is not there; or it holds NaN or infinity.
        """
        path = _path_of(place, home)
        experiment = saved_experiment(path)
        directory, step = find(path)
        with CheckpointReader(directory) as checkpoints:
            step = checkpoints.latest_good().step if step is None else step
            if step is None:
                raise WeightsError(f"{path} has no checkpoint yet; run its experiment first")
            # Its own dtypes, which may have gone by a device that this machine does not have.
            computed = checkpoints.meta(step)["identity"]["compute"]
            blueprint = build_blueprint(evolve(experiment, {"mesh": Mesh(), "precision.compute": computed}))
            here = _host()
            targets = {
                p: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
                for p, leaf in blueprint.trainable.items()
            }
            leaves = checkpoints.restore(step, {"trainable": targets})["trainable"]
        if not place.allow_non_finite:
            require_finite({name: np.asarray(leaf) for name, leaf in leaves.items()}, path)
        return cls(directory, step, experiment, blueprint, leaves)


def _path_of(place: Checkpoint | From, home: Path) -> Path:
    """The directory of a run, or of one step of it."""
    return Path(place.path).expanduser() if isinstance(place, Checkpoint) else home / place.experiment.id


def _adapter_on(
    place: Checkpoint | From, blueprint: Blueprint, home: Path, where: str
) -> tuple[LowRank, dict[str, np.ndarray]]:
    """The adapter that a run ended with, and its arrays by path.

    Args:
        place: The run.
        blueprint: Of a model with the weights that the adapter must be on.
        home: The directory of all runs.
        where: The field that names the run.

    Raises:
        PlanError: it is on other weights, or of another network.
        WeightsError: there is none.
    """
    path = _path_of(place, home)
    run, ours = _Trained.open(place, home), blueprint.experiment
    adapter = run.experiment.adapter
    if not isinstance(adapter, LowRank):
        raise WeightsError(f"{path} trained all weights and has no adapter; start from it with model.weights")
    problems: list[Problem] = []
    if run.experiment.model.weights != ours.model.weights:
        message = f"its adapter belongs to {run.experiment.model.weights!r}, not to {ours.model.weights!r}"
        problems.append(Problem(where, message))
    if attrs.evolve(run.blueprint.config, mtp_layers=0) != attrs.evolve(blueprint.config, mtp_layers=0):
        problems.append(Problem(where, f"{path} is of another network than {type(ours.model).__qualname__}"))
    if problems:
        raise PlanError(problems, f"Experiment '{ours.name}'")
    return adapter, {name: np.asarray(leaf) for name, leaf in run.leaves.items()}


def _adapter_of(place: Checkpoint | From, blueprint: Blueprint, home: Path) -> dict[str, np.ndarray]:
    """The adapter that a run ended with, for another run to go on with.

    Raises:
        PlanError: it is not like the adapter that is asked for, or not on the same weights.
        WeightsError: there is none.
    """
    ours = blueprint.experiment
    theirs, leaves = _adapter_on(place, blueprint, home, "adapter.start")
    assert isinstance(ours.adapter, LowRank)
    if problems := list(unlike(ours.adapter, theirs)):
        raise PlanError(problems, f"Experiment '{ours.name}'")
    return leaves


class MergedSource:
    """Weights with several adapters in them: `W + sum of coefficient (V - W)`, V the weight with one of them, float32.

    Args:
        blueprint: Of the model that the adapters were trained on.
        merged: The adapters, and how much of each.
        base: That model's weights.
        home: The directory of all runs.

    Raises:
        PlanError: a run's adapter is of other weights or of another network.
        WeightsError: there is no adapter.
    """

    def __init__(self, blueprint: Blueprint, merged: Merged, base: Source, home: Path) -> None:
        self._base, self._parts = base, []
        for place, coefficient in zip(merged.adapters, merged.coefficients, strict=True):
            if isinstance(place, PEFT):
                directory, allow = Path(place.path).expanduser(), place.allow_non_finite
                found = peft.read(directory, blueprint.config, blueprint.base, allow_non_finite=allow)
                self._parts.append((coefficient, found.adapter, found.leaves))
                continue
            assert isinstance(place, Checkpoint | From)
            self._parts.append((coefficient, *_adapter_on(place, blueprint, home, "model.weights.adapters")))

    def leaf(self, path: str) -> ArrayLike:
        """The weight of one path; float32 where adapters are merged into it."""
        weight = self._base.leaf(path)
        inside = [(c, adapter, leaves) for c, adapter, leaves in self._parts if path + lora_math.A in leaves]
        if not inside:
            return weight
        plain = jnp.asarray(weight, jnp.float32)
        return plain + sum(
            c * (lora_math.merged(adapter, path, plain, of.__getitem__) - plain) for c, adapter, of in inside
        )


def checkpoint_source(blueprint: Blueprint, place: Checkpoint) -> Source:
    """The weights of a run, of one of its checkpoints, or of a checkpoint of weights alone."""
    path = Path(place.path).expanduser()
    directory, _ = find(path)
    if (directory.parent / "experiment.json").is_file():
        return CheckpointSource(blueprint, place, path)
    return WeightsAlone(blueprint, path, allow_non_finite=place.allow_non_finite)


class WeightsAlone:
    """A checkpoint of weights alone, as `nnxdsl convert --to checkpoint` writes it; each array is read when asked for.

    Raises:
        WeightsError: it holds no weights; or every array that is missing, left over or of another shape.
    """

    def __init__(self, blueprint: Blueprint, path: Path, *, allow_non_finite: bool = False) -> None:
        directory, step = find(path)
        self._path, self._allow_non_finite = path, allow_non_finite
        self._checkpoints = CheckpointReader(directory)
        step = self._checkpoints.latest_good().step if step is None else step
        if step is None:
            raise WeightsError(f"{path} has no checkpoint yet")
        self._step = step
        contents = self._checkpoints.contents(step).get(PARAMS)
        if contents is None:
            raise WeightsError(f"{path}: is of a run whose experiment.json is gone, so it is not known what it holds")
        self._contents = contents
        problems = [
            f"{name}: expected an array of shape {leaf.shape}, "
            + (f"got {contents[name].shape}" if name in contents else "there is none")
            for name, leaf in blueprint.base.items()
            if name not in contents or tuple(contents[name].shape) != leaf.shape
        ]
        others = (name for name in contents if name not in blueprint.base and not is_mtp_param(name))
        problems += [f"{name}: no part of this network" for name in others]
        if problems:
            raise WeightsError("\n  ".join([f"{path}: {len(problems)} arrays do not fit:", *problems]))

    def leaf(self, path: str) -> ArrayLike:
        """The weight of one path, in the dtype that it is stored in.

        Raises:
            WeightsError: it holds NaN or infinity.
        """
        info = self._contents[path]
        target = jax.ShapeDtypeStruct(info.shape, np.dtype(info.dtype), sharding=_host())
        found = np.asarray(self._checkpoints.restore(self._step, {PARAMS: {path: target}})[PARAMS][path])
        if not (self._allow_non_finite or all_finite(found)):
            require_finite({path: found}, self._path)
        return found


def _host() -> jax.sharding.Sharding:
    """The host's memory, where it is a device of its own; else the first device."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves no other device
        device = jax.local_devices()[0]
    return jax.sharding.SingleDeviceSharding(device)
