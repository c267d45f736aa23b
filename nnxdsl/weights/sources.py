"""Sources of a run's initial weights and its tokenizer: Hub directories, checkpoints, earlier experiments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.adapters import lora_math, weight_only_quant
from nnxdsl.config.adapter import LowRank, adapter_differences
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.objectives.reference import Reference
from nnxdsl.config.tokenizer import Auto
from nnxdsl.config.weights import HF, PEFT, Checkpoint, From, Merged, Weights
from nnxdsl.data.tokenizers.base import TokenizerBase, mismatch, open_tokenizer
from nnxdsl.errors import PlanError, Problem, WeightsError
from nnxdsl.formats import peft, peft_config
from nnxdsl.formats.finite import all_finite, require_finite
from nnxdsl.formats.hf_download import locate
from nnxdsl.models.params import is_mtp_param
from nnxdsl.program import init
from nnxdsl.program.architecture import model_type
from nnxdsl.program.blueprint import Blueprint, build_unplaced
from nnxdsl.program.init import ArrayLike, Source, TeacherSource
from nnxdsl.program.teacher import teacher_of
from nnxdsl.runs.checkpoint_format import find
from nnxdsl.runs.saved_experiment import saved_experiment
from nnxdsl.terminal.display import Display
from nnxdsl.weights.saved_run import SavedRun, WeightsCheckpoint


def download(experiment: Experiment, display: Display) -> None:
    """Downloads what is not cached of the weights that an experiment, its teacher and its reference have on the Hub.

    Raises:
        WeightsError: There is no such directory, and no such repository or no network.
    """
    teacher, reference = teacher_of(experiment), experiment.reference
    weights = [experiment.model.weights, *([] if teacher is None else [teacher.model.weights])]
    weights += [reference.weights] if isinstance(reference, Reference.Checkpoint) else []
    for each in weights:
        base = each.base if isinstance(each, Merged) else each
        if isinstance(base, HF) and not Path(base.path).expanduser().is_dir():
            _download(base.path, display)


def _download(name: str, display: Display) -> None:
    phase = display.begin(f"opening {name}", unit="bytes")

    def report(done: int, total: int) -> None:
        phase.total = total
        display.advance(phase, max(done, phase.done))  # of two bars: what was received, and what was written

    try:
        locate(name, report=report)
    finally:
        display.end(phase)


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
    """The experiment whose `model.tokenizer` is used: with `Auto` over a checkpoint, that of the run it came from."""
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


def open_tokenizer_of(experiment: Experiment, home: Path, vocab_size: int) -> TokenizerBase:
    """Opens the tokenizer of an experiment for a run.

    Args:
        experiment: The experiment.
        home: The directory of all runs, with those of earlier experiments.
        vocab_size: The number of rows of the model's embedding.

    Raises:
        DataError: There is no tokenizer at the path, or it cannot be read.
        PlanError: It is not the tokenizer of the weights, or has more ids than the embedding has rows.
    """
    owner = tokenizer_owner(experiment)
    spec, directory = owner.model.tokenizer, tokenizer_directory(owner, home)
    tokenizer = open_tokenizer(spec, directory)
    if message := mismatch(spec, tokenizer, directory, vocab_size):
        raise PlanError([Problem("model.tokenizer", message)], f"Experiment '{experiment.name}'")
    return tokenizer


def open_source(blueprint: Blueprint, home: Path) -> Source:
    """Opens the base weights of an experiment, and those of its teacher or of a reference with own weights.

    Args:
        blueprint: The blueprint of the experiment.
        home: The directory of all runs, with those of earlier experiments.

    Raises:
        WeightsError: There is no such run, or it has another architecture.
        PlanError: Tensors of a Hub directory are missing or have another shape.
    """
    policy, teacher = _policy_source(blueprint, home), teacher_of(blueprint.experiment)
    if blueprint.reference.has_own_weights:
        reference = blueprint.experiment.reference
        assert isinstance(reference, Reference.Checkpoint)
        return init.ReferenceSource(policy, _model_source(init.with_weights(blueprint, reference.weights), home))
    if teacher is None:
        return policy
    return TeacherSource(policy, _policy_source(build_unplaced(teacher, blueprint.platform), home))


def _policy_source(blueprint: Blueprint, home: Path) -> Source:
    """The base weights, and the initial arrays of an adapter that starts from another one."""
    base = _model_source(blueprint, home)
    match blueprint.experiment.adapter and blueprint.experiment.adapter.start:
        case Checkpoint() | From() as place:
            leaves = _adapter_start(place, blueprint, home)
            return init.AdapterSource(base, leaves, is_pissa=starts_from_pissa(blueprint.experiment))
        case _:
            return init.with_adapter_start(blueprint, base)


def starts_from_pissa(experiment: Experiment) -> bool:
    """Whether the adapter that an experiment continues, or that this one continues, is one of PEFT's with PiSSA."""
    match experiment.adapter and experiment.adapter.start:
        case PEFT(path=path):
            return peft_config.is_pissa(peft_config.read_config(Path(path).expanduser()))
        case From(experiment=earlier):
            return starts_from_pissa(earlier)
        case Checkpoint(path=path):
            return starts_from_pissa(saved_experiment(Path(path).expanduser()))
        case _:
            return False


def _model_source(blueprint: Blueprint, home: Path) -> Source:
    """The base weights only."""
    match blueprint.experiment.model.weights:
        case Checkpoint() as place:
            path = Path(place.path).expanduser()
            if (find(path)[0].parent / "experiment.json").is_file():
                return init.with_score(blueprint, CheckpointSource(blueprint, place, path))
            weights = WeightsOnlySource(blueprint, path, allow_non_finite=place.allow_non_finite)
            return init.with_score(blueprint, weights)
        case From() as place:
            return init.with_score(blueprint, CheckpointSource(blueprint, place, home))
        case Merged(base=base) as merged:
            inner = attrs.evolve(blueprint, experiment=_with_weights(blueprint.experiment, base))
            return MergedSource(inner, merged, _model_source(inner, home), home)
        case _:
            return init.open_base(blueprint)


def _with_weights(experiment: Experiment, weights: Weights) -> Experiment:
    """The experiment with other initial weights."""
    return attrs.evolve(experiment, model=attrs.evolve(experiment.model, weights=weights))


def _experiment_or_none(path: Path) -> Experiment | None:
    """The experiment that saved a checkpoint; None for a checkpoint of weights only."""
    directory, _ = find(path.expanduser())
    is_run = (directory.parent / "experiment.json").is_file() or not (directory.parent / "config.json").is_file()
    return saved_experiment(path) if is_run else None


class CheckpointSource:
    """The weights that a run saved, with its adapter merged into the base.

    This is the final model of the run: with a quantized base, the adapter is merged into the dequantized base,
    including its rounding errors, since that is what the adapter was trained on. Writes nothing into the run directory.
    """

    def __init__(self, blueprint: Blueprint, place: Checkpoint | From, home: Path) -> None:
        path = _path_of(place, home)
        self._run, self._trained = _open_trained(place, home)
        self._blueprint, self.experiment, self.step = self._run.blueprint, self._run.experiment, self._run.step
        if not _has_same_architecture(self._blueprint, blueprint):
            raise WeightsError(
                f"{path} holds weights of another model than {type(blueprint.experiment.model).__qualname__}"
            )
        if self._blueprint.config.mtp_layers < blueprint.config.mtp_layers:
            raise WeightsError(f"{path} holds no multi-token-prediction (MTP) layer; set model.mtp_layers=0")
        # Runs from which the earlier run started are in its own home, which may be another than this one's.
        own_home = self._run.directory.parent
        self._base = open_source(self._blueprint, own_home) if self._blueprint.frozen else None

    def leaf(self, path: str) -> ArrayLike:
        """The weight at a path; float32 if it was trained."""
        if self._base is None or path in self._trained:
            return np.asarray(self._trained[path])
        weight = jnp.asarray(self._base.leaf(path), self._blueprint.base[path].dtype)
        quantization = self.experiment.quantization
        if quantization is not None and path not in self._blueprint.frozen:
            weight = weight_only_quant.rounded(weight, quantization)
        if path + lora_math.A not in self._trained:
            return weight
        adapter = self.experiment.adapter
        assert isinstance(adapter, LowRank)
        return lora_math.merged(adapter, path, weight, lambda name: np.asarray(self._trained[name]))


def _path_of(place: Checkpoint | From, home: Path) -> Path:
    """The directory of a run, or of one step of it."""
    return Path(place.path).expanduser() if isinstance(place, Checkpoint) else home / place.experiment.id


def _open_trained(place: Checkpoint | From, home: Path) -> tuple[SavedRun, dict[str, jax.Array]]:
    """A run and its trained arrays; a WeightsError if they hold NaN or infinity that `place` does not allow."""
    path = _path_of(place, home)
    run = SavedRun.open(path)
    trained = run.restore()
    if not place.allow_non_finite:
        require_finite({name: np.asarray(leaf) for name, leaf in trained.items()}, path)
    return run, trained


def _has_same_architecture(one: Blueprint, other: Blueprint) -> bool:
    """Whether two models are equal apart from multi-token-prediction layers, and a head of labels."""
    first, second = (each.config.with_fields({"mtp_layers": 0, "head.num_labels": None}) for each in (one, other))
    return first == second


def _saved_adapter(
    place: Checkpoint | From, blueprint: Blueprint, home: Path, field: str
) -> tuple[LowRank, dict[str, np.ndarray]]:
    """The adapter that a run saved, and its arrays by path.

    Raises:
        PlanError: It has other base weights or another architecture than `blueprint`; names `field`.
        WeightsError: The run has no adapter.
    """
    path, ours = _path_of(place, home), blueprint.experiment
    run, trained = _open_trained(place, home)
    adapter = run.experiment.adapter
    if not isinstance(adapter, LowRank):
        raise WeightsError(f"{path} trained all weights and has no adapter; start from it with model.weights")
    problems: list[Problem] = []
    if run.experiment.model.weights != ours.model.weights:
        message = f"its adapter belongs to {run.experiment.model.weights!r}, not to {ours.model.weights!r}"
        problems.append(Problem(field, message))
    if not _has_same_architecture(run.blueprint, blueprint):
        problems.append(Problem(field, f"{path} is of another model than {type(ours.model).__qualname__}"))
    if problems:
        raise PlanError(problems, f"Experiment '{ours.name}'")
    return adapter, {name: np.asarray(leaf) for name, leaf in trained.items()}


def _adapter_start(place: Checkpoint | From, blueprint: Blueprint, home: Path) -> dict[str, np.ndarray]:
    """The arrays of the adapter from which the experiment's adapter starts; a PlanError if their settings differ."""
    ours = blueprint.experiment
    theirs, leaves = _saved_adapter(place, blueprint, home, "adapter.start")
    assert isinstance(ours.adapter, LowRank)
    if problems := list(adapter_differences(ours.adapter, theirs)):
        raise PlanError(problems, f"Experiment '{ours.name}'")
    return leaves


_PISSA = (
    "an adapter with init_lora_weights='pissa' stands on another base than others, with which it is not merged; merge "
    "it with PEFT (merge_and_unload), or alone: nnxdsl export of a run with adapter.start"
)


class MergedSource:
    """Weights with several merged adapters: `W + sum of coefficient (V - W)`, V the weight with one of them, float32.

    Args:
        blueprint: The model on which the adapters were trained.
        merged: The adapters and their coefficients.
        base: The weights of that model.
        home: The directory of all runs.

    Raises:
        PlanError: An adapter has other base weights or another architecture.
        WeightsError: A run has no adapter.
    """

    def __init__(self, blueprint: Blueprint, merged: Merged, base: Source, home: Path) -> None:
        self._base, self._parts = base, []
        for place, coefficient in zip(merged.adapters, merged.coefficients, strict=True):
            if isinstance(place, PEFT):
                directory, allow = Path(place.path).expanduser(), place.allow_non_finite
                kind = model_type(blueprint.experiment)
                read = peft.read(directory, blueprint.config, blueprint.base, kind, allow_non_finite=allow)
                if read.is_pissa:
                    raise WeightsError(f"{directory}: {_PISSA}")
                self._parts.append((coefficient, read.adapter, {**read.leaves, **read.whole}))
                continue
            assert isinstance(place, Checkpoint | From)
            if starts_from_pissa(saved_experiment(_path_of(place, home))):
                raise WeightsError(f"{_path_of(place, home)}: {_PISSA}")
            self._parts.append((coefficient, *_saved_adapter(place, blueprint, home, "model.weights.adapters")))

    def leaf(self, path: str) -> ArrayLike:
        """The weight at a path; float32 if adapters are merged into it."""
        weight = self._base.leaf(path)
        parts = [part for part in self._parts if path + lora_math.A in part[2] or path in part[2]]
        if not parts:
            return weight
        plain = jnp.asarray(weight, jnp.float32)

        def merged(adapter: LowRank, leaves: Mapping[str, np.ndarray]) -> jax.Array:
            if path in leaves:  # an embedding or a head that the adapter replaces
                return jnp.asarray(leaves[path], jnp.float32)
            return lora_math.merged(adapter, path, plain, leaves.__getitem__)

        return plain + sum(c * (merged(adapter, leaves) - plain) for c, adapter, leaves in parts)


class WeightsOnlySource:
    """The arrays of a checkpoint of weights only, read one at a time.

    Raises:
        WeightsError: It holds no weights; or names every array that is missing, unexpected or of another shape.
    """

    def __init__(self, blueprint: Blueprint, path: Path, *, allow_non_finite: bool = False) -> None:
        self._path, self._allow_non_finite = path, allow_non_finite
        self._checkpoint = WeightsCheckpoint(path)
        arrays = self._checkpoint.arrays
        problems = [
            f"{name}: expected an array of shape {leaf.shape}, "
            + (f"got {arrays[name].shape}" if name in arrays else "there is none")
            for name, leaf in blueprint.base.items()
            if name not in arrays or arrays[name].shape != leaf.shape
        ]
        others = (name for name in arrays if name not in blueprint.base and not is_mtp_param(name))
        problems += [f"{name}: no array of this model" for name in others]
        if problems:
            raise WeightsError("\n  ".join([f"{path}: {len(problems)} arrays do not fit:", *problems]))

    def leaf(self, path: str) -> ArrayLike:
        """The weight at a path, in the dtype in which it is stored.

        Raises:
            WeightsError: It holds NaN or infinity.
        """
        weight = self._checkpoint.read(path)
        if not (self._allow_non_finite or all_finite(weight)):
            require_finite({path: weight}, self._path)
        return weight
