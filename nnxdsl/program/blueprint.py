"""The blueprint: a program without devices, with its model templates, layout, dtypes and problems."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from nnxdsl.adapters import lora_math, targets
from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.config.batching import Packed
from nnxdsl.config.data import Data
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.model import Model
from nnxdsl.errors import PlanError, Problem
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import LayerKind
from nnxdsl.models.params import AbstractModel, ParamSpec, is_indexer_param, is_mtp_param
from nnxdsl.models.remat import Remat
from nnxdsl.optim import adafactor, entropy_control, optimizers, param_filters, qk_clip, schedules, step_guard
from nnxdsl.optim.param_roles import roles
from nnxdsl.program import diloco, heads
from nnxdsl.program.architecture import architecture as architecture
from nnxdsl.program.attention_kernel import Kernels, compile_target, name_problems
from nnxdsl.program.batches.abstract import lengths
from nnxdsl.program.batches.base import BatchKind, Lengths, kind_of_data
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
        base_template: The published network, without adapter or quantization.
        policy: The model that is trained.
        reference: The reference model.
        trainable: The policy's trained leaves, by path.
        frozen: The policy's frozen leaves, by path.
        learning_rate: The learning rate by optimizer step, which `update` applies and metrics report.
        update: The optax transformation.
        layout: The sharding of every array.
        platform: "cpu", "gpu" or "tpu".
        teacher: The teacher of distillation, or None.
        steps: Steps of the whole run; None where they are given in epochs and rows have not been counted.
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
    learning_rate: schedules.Curve
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

    def with_steps(self, steps: int) -> Blueprint:
        """This run with `steps` steps, on which only its learning rate depends."""
        learning_rate = schedules.curve(self.experiment, steps)
        update = _update(self.experiment, learning_rate, self.trainable)
        return attrs.evolve(self, steps=steps, learning_rate=learning_rate, update=update)

    @property
    def base(self) -> Mapping[str, ParamSpec]:
        """Leaves of the published network, by path."""
        return self.base_template.variables

    def with_placement(self, experiment: Experiment) -> Blueprint:
        """The same program placed as `experiment` sets it, which differs in placement alone."""
        layout = self.layout if experiment.mesh == self.experiment.mesh else self.layout.on(experiment.mesh)
        return attrs.evolve(self, experiment=experiment, layout=layout)

    @property
    def routed_experts(self) -> tuple[int, int] | None:
        """Numbers of layers and of experts of a token, where rollouts have the experts of tokens; else None."""
        if not self.experiment.objective.router_replay or self.config.moe is None:
            return None
        return self.config.layers.num_layers, self.config.moe.num_experts_per_tok

    @property
    def num_generations(self) -> int:
        """Completions of a row: those of a prompt where whole groups fill the micro-batch of every device, else 1.

        The router's loss counts tokens, so that a prompt has the weight of its completions there.
        """
        experiment, layout = self.experiment, self.layout
        group, rows = experiment.objective.num_generations, experiment.rows_at_once
        is_whole = rows % group == 0 and rows // group % layout.batch_shards(rows) == 0
        is_split = layout.length_shards > 1 or layout.stages > 1
        return group if is_whole and not is_split and experiment.router_aux_loss_coef == 0 else 1

    @property
    def rows_at_once(self) -> int:
        """Rows of one micro-batch, over all devices."""
        return self.experiment.rows_at_once // self.num_generations

    @property
    def longest(self) -> Lengths:
        """The longest row that the data may yield; of no tokens where nothing bounds it."""
        return lengths(self.experiment.data, self.num_generations)

    @property
    def blocks(self) -> int:
        """Number of blocks of a packed batch: the shards of a micro-batch, times the number of micro-batches."""
        return self.experiment.microbatches * self.layout.batch_shards(self.experiment.rows_at_once)

    @property
    def kernels(self) -> Kernels:
        """The attention kernels: `kernels.choose(row)` returns one with its reason."""
        return self._kernels(self.config)

    @property
    def teacher_kernels(self) -> Kernels:
        """The attention kernels of the teacher."""
        assert self.teacher is not None
        return self._kernels(self.teacher.config)

    def _kernels(self, config: DecoderConfig) -> Kernels:
        target = compile_target(self.platform, self.compute, config, self.layout)
        is_packed = isinstance(self.experiment.batching, Packed)
        return Kernels(config, self.experiment.memory.attention, target, is_packed)

    @property
    def remat(self) -> Remat:
        """The rematerialization policy; "none" until one is chosen."""
        remat = self.experiment.memory.remat
        return "none" if remat == "auto" else remat

    @property
    def forward_batch_size(self) -> int:
        """Rows of one forward pass without a backward pass, over all devices.

        Those of a micro-batch on CPUs, which gain nothing from more, and with rematerialization, which leaves no memory
        for more.
        """
        has_room = self.remat == "none" and self.platform != "cpu"
        return self.experiment.rows_at_once * (_FORWARD_MICROBATCHES if has_room else 1)

    @property
    def teacher_layout(self) -> Layout:
        """The layout with the teacher's weights; those of a precomputed teacher exist during precomputation only."""
        if self.teacher is None or "teacher" in self.layout.arrays:
            return self.layout
        arrays = {path: Array(leaf.shape, leaf.dtype, leaf.axes) for path, leaf in self.teacher.base.items()}
        return self.layout.with_part("teacher", arrays)

    @property
    def mtp_layer_kinds(self) -> tuple[LayerKind, ...]:
        """The layer kinds of multi-token prediction (MTP); empty where no loss uses them."""
        return self.config.mtp_layer_kinds if self.experiment.mtp_loss_weight else ()

    @property
    def head(self) -> heads.Head:
        """What a forward pass is read for."""
        return heads.build(self.experiment.objective)

    @property
    def head_path(self) -> str:
        """The path of the head's weights; the embedding's where they are tied."""
        if self.config.head.num_labels is not None:
            return "score.kernel"
        return "embed.embedding" if self.config.head.tied else "lm_head.kernel"

    @property
    def parameters(self) -> dict[str, int]:
        """Numbers of parameters: "total" of the published network, and "trainable"."""
        return {"total": _size(self.base), "trainable": _size(self.trainable)}


def build_blueprint(experiment: Experiment, platform: str = "cpu", steps: int | None = None) -> Blueprint:
    """Build the blueprint of an experiment.

    Args:
        experiment: The experiment.
        platform: "cpu", "gpu" or "tpu"; it decides `Precision.compute="auto"`.
        steps: The experiment's epochs in steps; None where it has steps, or where nothing is trained.

    Raises:
        PlanError: with all problems at once.
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
    """Build a blueprint without checking that its arrays divide over its mesh, to place it on other meshes.

    Raises:
        PlanError: with all problems that do not depend on the mesh.
    """
    blueprint, problems = _build_unplaced(experiment, platform)
    if problems:
        raise PlanError(problems, f"Experiment '{experiment.name}'")
    return blueprint


def _build_unplaced(experiment: Experiment, platform: str, steps: int | None = None) -> tuple[Blueprint, list[Problem]]:
    steps = experiment.steps if steps is None else steps
    config = heads.build(experiment.objective).network(architecture(experiment.model))
    adapter, quantization = experiment.adapter, experiment.quantization
    compute, frozen_dtype = dtypes(experiment, platform)

    base = abstract_decoder(config, frozen_dtype)
    # MTP layers are neither adapted nor quantized.
    decoder = {path: leaf for path, leaf in base.variables.items() if not is_mtp_param(path)}
    problems = targets.problems(adapter, quantization, decoder) + _length_problems(experiment, experiment.model, config)
    problems += name_problems(experiment.memory.attention)
    if experiment.router_aux_loss_coef and config.moe is None:
        problems.append(Problem("model.router_aux_loss_coef", "has no effect: the model has no experts (MoE)"))
    if experiment.mtp_loss_weight and not config.mtp_layers:
        problems.append(
            Problem("objective.mtp_loss_weight", "the model has no multi-token-prediction (MTP) layer; set 0")
        )
    kind = kind_of_data(experiment.data)
    if experiment.mtp_loss_weight and kind is not None and type(kind).mtp_targets is BatchKind.mtp_targets:
        name = type(experiment.data).__qualname__
        message = f"multi-token prediction (MTP) is not supported for data of {name}; set 0"
        problems.append(Problem("objective.mtp_loss_weight", message))
    if config.head.num_labels is not None:
        problems += _label_problems(experiment)
    for field, part in (("evaluation", experiment.evaluation), ("objective", experiment.objective)):
        if part is not None and part.num_speculative_tokens and (message := config.speculative_problem):
            problems.append(Problem(f"{field}.num_speculative_tokens", f"{message}; set 0"))
    if experiment.objective.router_replay and config.moe is None:
        problems.append(Problem("objective.router_replay", "has no effect: the model has no experts (MoE); set False"))
    if experiment.objective.router_replay and experiment.mesh.stage > 1:
        message = "is not supported with pipeline parallelism; set mesh.stage=1"
        problems.append(Problem("objective.router_replay", message))
    if experiment.objective.kv_cache_dtype and (message := config.kv_cache_problem):
        problems.append(Problem("objective.kv_cache_dtype", f"{message}; set None"))
    if experiment.mesh.stage > 1 and (config.layers.num_kv_shared_layers or config.per_layer_embedding):
        message = "KV sharing and per-layer embeddings are not supported with pipeline parallelism"
        problems.append(Problem("mesh.stage", f"{message}; set 1"))
    if problems:
        raise PlanError(problems, f"Experiment '{experiment.name}'")
    policy = abstract_decoder(config, frozen_dtype, adapter, quantization) if adapter or quantization else base
    problems = targets.missed(adapter, quantization, policy, decoder)
    # A head of labels is trained in full, also with an adapter.
    trained = {p for p in policy.variables if adapter is None or lora_math.is_adapter(p) or p.startswith("score.")}
    # MTP layers are trained in full, also with an adapter; without an MTP loss they get no gradient.
    mtp = {path for path in policy.variables if is_mtp_param(path)}
    trained = trained | mtp if experiment.mtp_loss_weight else trained - mtp
    if not experiment.indexer_loss_coef:  # nor do indexers
        trained = {path for path in trained if not is_indexer_param(path)}
    elif experiment.model.indexer_stage == "dense_warmup":
        trained = {path for path in trained if is_indexer_param(path)}
    problems += param_filters.unmatched_patterns("frozen", experiment.frozen, trained)
    trained = {path for path in trained if not param_filters.matches(experiment.frozen, path)}
    if experiment.indexer_loss_coef and not any(map(is_indexer_param, trained)):
        problems.append(Problem("frozen", "freezes all indexers, which model.indexer_loss_coef trains; set that to 0"))
    trainable = {
        p: attrs.evolve(policy.variables[p], dtype=jnp.dtype("float32")) for p in policy.variables if p in trained
    }
    frozen = {path: leaf for path, leaf in policy.variables.items() if path not in trained}
    if not trainable and not problems and experiment.frozen:
        problems.append(Problem("frozen", "freezes every parameter; nothing is left to train"))
    elif not trainable and not problems:
        problems.append(Problem("adapter", f"{type(adapter).__qualname__} adds no trainable parameters"))
    without_adapter = (
        abstract_decoder(config, frozen_dtype, None, quantization)
        if experiment.has_reference and quantization
        else base
    )
    reference = build_reference(PolicyParts(experiment, base, without_adapter, trainable, compute))
    problems += optimizers.problems(experiment.optimizer, roles(trainable))
    problems += qk_clip.problems(experiment.optimizer, config, trainable)
    learning_rate = schedules.curve(experiment, steps)
    update = _update(experiment, learning_rate, trainable)
    teacher = _teacher(experiment, config, frozen_dtype, frozen, problems)
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
        learning_rate,
        update,
        layout,
        platform,
        teacher,
        steps,
    )
    return blueprint, problems


def _teacher(
    experiment: Experiment,
    config: DecoderConfig,
    frozen_dtype: DTypeLike,
    frozen: Mapping[str, ParamSpec],
    problems: list[Problem],
) -> Teacher | None:
    """The teacher, or None; its problems are appended to `problems`."""
    teacher_experiment = teacher_of(experiment)
    if teacher_experiment is None:
        return None
    teacher = architecture(teacher_experiment.model)
    if teacher.vocab_size != config.vocab_size:
        sizes = f"vocab_size {teacher.vocab_size:,}, the student has vocab_size {config.vocab_size:,}"
        problems.append(
            Problem("objective.teacher", f"teacher and student vocabularies differ: the teacher has {sizes}")
        )
    objective = experiment.objective
    if objective.feature_weight and teacher.embed_dim != config.embed_dim:
        message = f"the teacher's embed_dim is {teacher.embed_dim:,}, the student's {config.embed_dim:,}; set 0"
        problems.append(Problem("objective.feature_weight", message))
    if objective.teacher_top_k is not None and objective.teacher_top_k > teacher.vocab_size:
        message = f"top_k={objective.teacher_top_k:,} exceeds the teacher's vocab_size {teacher.vocab_size:,}"
        problems.append(Problem("objective.top_k", message))
    problems += _length_problems(experiment, teacher_experiment.model, teacher)
    return build_teacher(experiment, teacher, abstract_decoder(teacher, frozen_dtype), frozen)


def dtypes(experiment: Experiment, platform: str) -> tuple[jnp.dtype, jnp.dtype]:
    """Dtypes of computation and of frozen weights."""
    precision = experiment.precision
    compute = precision.compute
    if compute == "auto":
        compute = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(compute), jnp.dtype(compute if precision.frozen == "auto" else precision.frozen)


def _update(
    experiment: Experiment, learning_rate: schedules.Curve, trainable: Mapping[str, ParamSpec]
) -> optax.GradientTransformation:
    update, objective = optimizers.build(experiment.optimizer, learning_rate, roles(trainable)), experiment.objective
    if objective.adaptive_entropy is not None:
        update = entropy_control.wrap(update, objective.entropy_coef)
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
    """Arrays of the optimizer's state by path, with the logical axes of the parameter that each belongs to."""
    params = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in trainable.items()}
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.eval_shape(update.init, params))
    arrays: dict[str, Array] = {}
    for keys, leaf in leaves:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        owner = getattr(keys[-1], "key", None)
        param = trainable.get(owner) if isinstance(owner, str) else None
        front = diloco.is_of_workers(keys)
        axes = None if param is None else _state_axes(param, getattr(keys[-2], "name", ""), leaf.shape[front:])
        if axes is None:
            arrays[path] = Array(leaf.shape, leaf.dtype, (None,) * len(leaf.shape), has_worker_axis=front)
        else:
            arrays[path] = Array(leaf.shape, leaf.dtype, (None,) * front + axes, str(owner), front)
    return arrays


def _state_axes(param: ParamSpec, field: str, shape: tuple[int, ...]) -> Axes | None:
    """The parameter's axes that an array of the optimizer's state has: all, or all but one where it is factored."""
    if param.shape == shape:
        return param.axes
    dropped = adafactor.DROPPED.get(field, 0) + len(param.shape)
    axes = [index for index in range(len(param.shape)) if index != dropped]
    return tuple(param.axes[i] for i in axes) if tuple(param.shape[i] for i in axes) == shape else None


def _length_problems(experiment: Experiment, model: Model, config: DecoderConfig) -> list[Problem]:
    sources: list[tuple[str, Data]] = [("data", experiment.data)]
    if experiment.evaluation is not None and experiment.evaluation.data is not None:
        sources.append(("evaluation.data", experiment.evaluation.data))
    limit, size = config.max_length, type(model).__qualname__
    problems: list[Problem] = []
    for field, data in sources:
        tokens = sum(data.max_lengths())
        if tokens > limit:
            message = f"{' + '.join(data.length_fields)} is {tokens} tokens, {size} reads at most {limit}"
            problems.append(Problem(f"{field}.{data.length_fields[0]}", message))
        elif data.batch_kind == "prompts" and (message := config.generation_problem(*data.max_lengths())):
            problems.append(
                Problem(f"{field}.{data.length_fields[0]}", f"{message}; lower it, or the completion length")
            )
    evaluation = experiment.evaluation
    if evaluation is not None and evaluation.prompts and evaluation.max_new_tokens >= limit:
        message = f"{evaluation.max_new_tokens} tokens leave no room for a prompt, {size} reads at most {limit}"
        problems.append(Problem("evaluation.max_new_tokens", message))
    return problems


def _label_problems(experiment: Experiment) -> list[Problem]:
    """What needs an output head over the vocabulary, where the objective has a head of labels."""
    name, problems = type(experiment.objective).__qualname__, []
    if experiment.mtp_loss_weight:
        message = f"{name} has no output head over the vocabulary, which multi-token prediction (MTP) needs; set 0"
        problems.append(Problem("objective.mtp_loss_weight", message))
    if experiment.evaluation is not None and experiment.evaluation.prompts:
        message = f"{name} has no output head over the vocabulary, so nothing can be sampled; leave prompts out"
        problems.append(Problem("evaluation.prompts", message))
    return problems


def _size(leaves: Mapping[str, ParamSpec]) -> int:
    return sum(math.prod(leaf.shape) for leaf in leaves.values())
