"""What is known of a program before a device is touched: templates, layout, dtypes, and what does not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.adapters import lora, lora_math, targets
from nnxdsl.config.adapter import Adapter
from nnxdsl.config.batching import Packed
from nnxdsl.config.data import Data
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.objectives.distillation import Distill
from nnxdsl.config.quantization import Quantization
from nnxdsl.errors import PlanError, Problem
from nnxdsl.models.config.decoder import DecoderConfig, LayerKind
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.params import AbstractModel, ParamSpec, abstract, is_indexer_param, is_mtp_param
from nnxdsl.models.remat import Remat
from nnxdsl.optim import adafactor, optimizers, param_filters, qk_clip, schedules, step_guard
from nnxdsl.optim.param_roles import roles
from nnxdsl.program import diloco
from nnxdsl.program.architecture import architecture as architecture
from nnxdsl.program.attention_kernel import Kernels, kernels
from nnxdsl.program.batches.base import BatchKind, kind_of_data
from nnxdsl.program.layout_warnings import nearest_meshes
from nnxdsl.program.reference import PolicyParts, ReferenceModel, build_reference
from nnxdsl.program.teacher import Teacher, build_teacher, teacher_of
from nnxdsl.sharding.layout import Array, Layout
from nnxdsl.sharding.rules import Axes

_FORWARD_MICROBATCHES = 4
"""Micro-batches of one forward pass without a backward pass."""


@attrs.frozen(eq=False)
class Blueprint:
    """A program without devices.

    Attributes:
        experiment: The experiment.
        config: The network's numbers.
        compute: Dtype of activations and products.
        frozen_dtype: Dtype of frozen weights.
        base_template: The network as it is published: neither adapted nor quantised.
        policy: The model that is trained.
        reference: The model that it is compared with.
        trainable: Leaves that are trained, by path.
        frozen: Leaves of the policy that are not.
        update: The optax transformation.
        layout: Where everything lives.
        platform: "cpu", "gpu" or "tpu".
        teacher: The model that is learnt from, or None.
    """

    experiment: Experiment
    config: DecoderConfig
    compute: jnp.dtype
    frozen_dtype: jnp.dtype
    base_template: AbstractModel
    policy: AbstractModel
    reference: ReferenceModel
    trainable: Mapping[str, ParamSpec]
    frozen: Mapping[str, ParamSpec]
    update: optax.GradientTransformation
    layout: Layout
    platform: str
    teacher: Teacher | None = None
    steps: int | None = None

    @property
    def total_steps(self) -> int:
        """Steps of the whole run.

        Raises:
            PlanError: They are given as epochs, and the rows have not been counted.
        """
        if self.steps is None:
            raise PlanError([schedules.uncounted(self.experiment)], f"Experiment '{self.experiment.name}'")
        return self.steps

    @property
    def base(self) -> Mapping[str, ParamSpec]:
        """Leaves of the published network, by path."""
        return self.base_template.variables

    def with_placement(self, experiment: Experiment) -> Blueprint:
        """The same program where `experiment`, which differs in nothing but placement, wants it."""
        layout = self.layout if experiment.mesh == self.experiment.mesh else self.layout.on(experiment.mesh)
        return attrs.evolve(self, experiment=experiment, layout=layout)

    @property
    def blocks(self) -> int:
        """Shares of a batch that are computed apart: as many as a micro-batch is cut into, of each micro-batch."""
        return self.experiment.microbatches * self.layout.batch_shards(self.experiment.rows_at_once)

    @property
    def kernels(self) -> Kernels:
        """The attention kernels: `kernels.choose(row)` returns one with its reason."""
        memory, is_packed = self.experiment.memory, isinstance(self.experiment.batching, Packed)
        return kernels(memory.attention, self.platform, self.compute, self.config, self.layout, packed=is_packed)

    @property
    def teacher_kernels(self) -> Kernels:
        """As `kernels`, of the teacher."""
        assert self.teacher is not None
        memory, is_packed = self.experiment.memory, isinstance(self.experiment.batching, Packed)
        config = self.teacher.config
        return kernels(memory.attention, self.platform, self.compute, config, self.layout, packed=is_packed)

    @property
    def remat(self) -> Remat:
        """The rematerialization policy; "none" until one is chosen."""
        remat = self.experiment.memory.remat
        return "none" if remat == "auto" else remat

    @property
    def forward_batch_size(self) -> int:
        """Rows of one forward pass without a backward pass, over all devices.

        A CPU gains nothing from more rows than a micro-batch has, and with rematerialization there is no room for more.
        """
        has_room = self.remat == "none" and self.platform != "cpu"
        return self.experiment.rows_at_once * (_FORWARD_MICROBATCHES if has_room else 1)

    @property
    def teacher_layout(self) -> Layout:
        """The layout with the teacher's weights; a precomputed teacher's are there during precomputation only."""
        if self.teacher is None or "teacher" in self.layout.arrays:
            return self.layout
        arrays = {path: Array(leaf.shape, leaf.dtype, leaf.axes) for path, leaf in self.teacher.base.items()}
        return self.layout.with_part("teacher", arrays)

    @property
    def mtp_layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer of multi-token prediction that a loss reads."""
        return self.config.mtp_layer_kinds if self.experiment.mtp_loss_weight else ()

    @property
    def head_path(self) -> str:
        """The path of the output head's weights, which are the embedding's where they are tied."""
        return "embed.embedding" if self.config.tied_head else "lm_head.kernel"

    @property
    def parameters(self) -> dict[str, int]:
        """Numbers of parameters: of the published network, of those that are trained."""
        return {"total": _size(self.base), "trainable": _size(self.trainable)}


def build_blueprint(experiment: Experiment, platform: str = "cpu", steps: int | None = None) -> Blueprint:
    """The blueprint of an experiment.

    Args:
        experiment: The experiment.
        platform: "cpu", "gpu" or "tpu": what `Precision.compute="auto"` goes by.
        steps: What the experiment's epochs are in steps; None where it has steps, or where nothing is trained.

    Raises:
        PlanError: with everything that does not fit.
    """
    blueprint, problems = _build_unplaced(experiment, platform, steps)
    rows = "batch_size" if experiment.microbatch_size is None else "microbatch_size"
    problems += blueprint.kernels.problems()
    misplaced = blueprint.teacher_layout.problems() + blueprint.layout.batch_problems(experiment.rows_at_once, rows)
    problems += misplaced + nearest_meshes(blueprint.layout, experiment.rows_at_once, misplaced)
    if problems:
        raise PlanError(problems, f"Experiment '{experiment.name}'")
    return blueprint


def build_unplaced(experiment: Experiment, platform: str = "cpu") -> Blueprint:
    """The blueprint of an experiment whose arrays need not fit its mesh: something to place on other meshes.

    Raises:
        PlanError: with everything that fits no mesh.
    """
    blueprint, problems = _build_unplaced(experiment, platform)
    if problems:
        raise PlanError(problems, f"Experiment '{experiment.name}'")
    return blueprint


def _build_unplaced(experiment: Experiment, platform: str, steps: int | None = None) -> tuple[Blueprint, list[Problem]]:
    steps = experiment.steps if steps is None else steps
    config = architecture(experiment.model)
    adapter, quantization = experiment.adapter, experiment.quantization
    compute, frozen_dtype = dtypes(experiment, platform)

    base = template(config, frozen_dtype)
    # Neither is put on a layer behind the decoder.
    own = {path: leaf for path, leaf in base.variables.items() if not is_mtp_param(path)}
    problems = targets.problems(adapter, quantization, own) + _length_problems(experiment, config)
    if experiment.router_aux_loss_coef and config.moe is None:
        problems.append(Problem("model.router_aux_loss_coef", "has no effect: this network has no experts"))
    if experiment.mtp_loss_weight and not config.mtp_layers:
        problems.append(
            Problem("objective.mtp_loss_weight", "the model has no multi-token-prediction (MTP) layer; set 0")
        )
    kind = kind_of_data(experiment.data)
    if experiment.mtp_loss_weight and kind is not None and type(kind).mtp_targets is BatchKind.mtp_targets:
        name = type(experiment.data).__qualname__
        message = f"batches of {name} have no targets of multi-token prediction (MTP); set 0"
        problems.append(Problem("objective.mtp_loss_weight", message))
    for where, part in (("evaluation", experiment.evaluation), ("objective", experiment.objective)):
        if part is not None and part.num_speculative_tokens and (message := config.speculative_problem):
            problems.append(Problem(f"{where}.num_speculative_tokens", f"{message}; set 0"))
    if experiment.mesh.stage > 1 and (config.kv_sharing or config.per_layer_embedding):
        message = "keys and values of other layers, and embeddings of each layer, do not pass through pipeline stages"
        problems.append(Problem("mesh.stage", f"{message}; set 1"))
    if problems:
        raise PlanError(problems, f"Experiment '{experiment.name}'")
    policy = template(config, frozen_dtype, adapter, quantization) if adapter or quantization else base
    problems = targets.missed(adapter, quantization, policy, own)
    trained = {path for path in policy.variables if adapter is None or lora_math.is_adapter(path)}
    # An MTP layer is trained whole, beside an adapter too; without its loss no gradient reaches it.
    mtp = {path for path in policy.variables if is_mtp_param(path)}
    trained = trained | mtp if experiment.mtp_loss_weight else trained - mtp
    if not experiment.indexer_loss_coef:  # neither does one reach indexers
        trained = {path for path in trained if not is_indexer_param(path)}
    elif experiment.model.indexer_stage == "dense_warmup":
        trained = {path for path in trained if is_indexer_param(path)}
    problems += param_filters.unmatched_patterns("frozen", experiment.frozen, trained)
    trained = {path for path in trained if not param_filters.matches(experiment.frozen, path)}
    if experiment.indexer_loss_coef and not any(map(is_indexer_param, trained)):
        problems.append(
            Problem("frozen", "names all indexers, which model.indexer_loss_coef is to train; set that to 0")
        )
    trainable = {
        p: attrs.evolve(policy.variables[p], dtype=jnp.dtype("float32")) for p in policy.variables if p in trained
    }
    frozen = {path: leaf for path, leaf in policy.variables.items() if path not in trained}
    if not trainable and not problems and experiment.frozen:
        problems.append(Problem("frozen", "names every array of the model, so there is nothing to train"))
    elif not trainable and not problems:
        problems.append(Problem("adapter", f"{type(adapter).__qualname__} adds nothing to train"))
    without_adapter = (
        template(config, frozen_dtype, None, quantization) if experiment.has_reference and quantization else base
    )
    reference = build_reference(PolicyParts(experiment, base, without_adapter, trainable, compute))
    problems += optimizers.problems(experiment.optimizer, roles(trainable))
    problems += qk_clip.problems(experiment.optimizer, config, trainable)
    update = _update(experiment, steps, trainable)
    teacher = _teacher(experiment, config, frozen_dtype, problems)
    arrays = _arrays(frozen, trainable, reference.arrays, {} if teacher is None else teacher.arrays, update)
    workers = 1 if experiment.outer is None else experiment.outer.workers
    layout = Layout(experiment.mesh, arrays, experiment.memory.offload, workers)
    blueprint = Blueprint(
        experiment,
        config,
        compute,
        frozen_dtype,
        base,
        policy,
        reference,
        trainable,
        frozen,
        update,
        layout,
        platform,
        teacher,
        steps,
    )
    return blueprint, problems


def _teacher(
    experiment: Experiment, config: DecoderConfig, frozen_dtype: DTypeLike, problems: list[Problem]
) -> Teacher | None:
    """The model that is learnt from; what does not fit is added to the problems."""
    teacher_experiment = teacher_of(experiment)
    if teacher_experiment is None:
        return None
    own = architecture(teacher_experiment.model)
    if own.vocab_size != config.vocab_size:
        sizes = f"has a vocabulary of {own.vocab_size:,} words, the model one of {config.vocab_size:,}"
        problems.append(Problem("objective.teacher", f"{sizes}; distributions over other words cannot be compared"))
    distill = experiment.objective
    assert isinstance(distill, Distill)
    if distill.feature_weight and own.embed_dim != config.embed_dim:
        message = f"the teacher's hidden states have {own.embed_dim:,} numbers, the model's {config.embed_dim:,}; set 0"
        problems.append(Problem("objective.feature_weight", message))
    if distill.top_k is not None and distill.top_k > own.vocab_size:
        message = f"{distill.top_k:,} words are more than the teacher's vocabulary of {own.vocab_size:,} has"
        problems.append(Problem("objective.top_k", message))
    problems += _length_problems(teacher_experiment, own)
    return build_teacher(distill, own, template(own, frozen_dtype))


def template(
    config: DecoderConfig, dtype: DTypeLike, adapter: Adapter | None = None, quantization: Quantization | None = None
) -> AbstractModel:
    """A decoder without its arrays: adapted, quantised, or as it is published."""
    change = lora.adapt(adapter, quantization, config)
    return abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=dtype, adapt=change))


def dtypes(experiment: Experiment, platform: str) -> tuple[jnp.dtype, jnp.dtype]:
    """Dtypes of computation and of frozen weights."""
    precision = experiment.precision
    compute = precision.compute
    if compute == "auto":
        compute = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(compute), jnp.dtype(compute if precision.frozen == "auto" else precision.frozen)


def _update(
    experiment: Experiment, steps: int | None, trainable: Mapping[str, ParamSpec]
) -> optax.GradientTransformation:
    curve = schedules.curve(experiment, steps)
    update = optimizers.build(experiment.optimizer, curve, roles(trainable))
    if experiment.outer is not None:
        update = diloco.with_diloco(update, experiment.outer)
    return step_guard.build(experiment.guard).wrap(update)


def _arrays(
    frozen: Mapping[str, ParamSpec],
    trainable: Mapping[str, ParamSpec],
    copied: Mapping[str, ParamSpec],
    teacher: Mapping[str, ParamSpec],
    update: optax.GradientTransformation,
) -> dict[str, dict[str, Array]]:
    parts = {
        part: {path: Array(leaf.shape, leaf.dtype, leaf.axes) for path, leaf in leaves.items()}
        for part, leaves in (
            ("frozen", frozen),
            ("trainable", trainable),
            ("reference", copied),
            ("teacher", teacher),
        )
    }
    return {**parts, "optimizer": optimizer_arrays(update, trainable)}


def optimizer_arrays(update: optax.GradientTransformation, trainable: Mapping[str, ParamSpec]) -> dict[str, Array]:
    """Every array of the optimizer's state by its path, with the logical axes of the parameter that it belongs to."""
    params = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in trainable.items()}
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.eval_shape(update.init, params))
    found: dict[str, Array] = {}
    for keys, leaf in leaves:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        owner = getattr(keys[-1], "key", None)
        own = trainable.get(owner) if isinstance(owner, str) else None
        front = diloco.is_of_workers(keys)
        axes = None if own is None else _state_axes(own, getattr(keys[-2], "name", ""), leaf.shape[front:])
        if axes is None:
            found[path] = Array(leaf.shape, leaf.dtype, (None,) * len(leaf.shape), has_worker_axis=front)
        else:
            found[path] = Array(leaf.shape, leaf.dtype, (None,) * front + axes, str(owner), front)
    return found


def _state_axes(own: ParamSpec, field: str, shape: tuple[int, ...]) -> Axes | None:
    """The axes of a parameter that an array of the optimizer's state has: all, or all but one where it is factored."""
    if own.shape == shape:
        return own.axes
    dropped = adafactor.DROPPED.get(field, 0) + len(own.shape)
    dimensions = [index for index in range(len(own.shape)) if index != dropped]
    return (
        tuple(own.axes[index] for index in dimensions)
        if tuple(own.shape[index] for index in dimensions) == shape
        else None
    )


def _length_problems(experiment: Experiment, config: DecoderConfig) -> list[Problem]:
    sources: list[tuple[str, Data]] = [("data", experiment.data)]
    if experiment.evaluation is not None and experiment.evaluation.data is not None:
        sources.append(("evaluation.data", experiment.evaluation.data))
    limit, size = config.max_length, type(experiment.model).__qualname__
    found: list[Problem] = []
    for where, data in sources:
        tokens = sum(data.max_lengths())
        if tokens > limit:
            message = f"{' + '.join(data.length_fields)} is {tokens} tokens, {size} reads at most {limit}"
            found.append(Problem(f"{where}.{data.length_fields[0]}", message))
        elif data.batch_kind == "prompts" and (message := config.generation_problem(*data.max_lengths())):
            found.append(Problem(f"{where}.{data.length_fields[0]}", f"{message}; lower it, or the answers' length"))
    if experiment.evaluation is not None and experiment.evaluation.max_new_tokens >= limit:
        message = (
            f"{experiment.evaluation.max_new_tokens} tokens leave no room for a prompt, {size} reads at most {limit}"
        )
        found.append(Problem("evaluation.max_new_tokens", message))
    return found


def _size(leaves: Mapping[str, ParamSpec]) -> int:
    return sum(math.prod(leaf.shape) for leaf in leaves.values())
