"""What is known of a program before a device is touched: templates, layout, dtypes, and what does not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import singledispatch
from pathlib import Path

import attrs
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnxdsl.models import hub
from nnxdsl.models.config import GEMMA3, DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.tree import Leaf, Template, abstract
from nnxdsl.program import adapters, optimizer
from nnxdsl.program.layout import Axes, Layout
from nnxdsl.spec.data import Conversations, Data, Preferences, Text
from nnxdsl.spec.errors import NotRegisteredError, PlanError, Problem
from nnxdsl.spec.experiment import Experiment
from nnxdsl.spec.model import Gemma3, Model
from nnxdsl.spec.weights import HF


@singledispatch
def architecture(model: Model) -> DecoderConfig:
    """The network of a model; register a `Model` of your own here."""
    name = type(model).__name__
    raise NotRegisteredError(
        f"no network is registered for {type(model).__qualname__}; write\n"
        f"  from nnxdsl.program import blueprint\n"
        f"  @blueprint.architecture.register({name})\n"
        f"  def _(model): return DecoderConfig(...)"
    )


@architecture.register
def _(model: Gemma3) -> DecoderConfig:
    config = GEMMA3[model.size]
    if not isinstance(model.weights, HF) or not (directory := Path(model.weights.path).expanduser()).is_dir():
        return config
    # What the weights say of themselves must be what was asked for; the vocabulary may be padded differently.
    stored = hub.read_config(directory)
    asked = attrs.evolve(config, vocab_size=stored.vocab_size, max_length=stored.max_length)
    problems = config_problems(stored, asked, model.weights.path)
    if problems:
        raise PlanError(problems, f"Model.Gemma3({model.size!r})")
    return stored


def config_problems(stored: DecoderConfig, asked: DecoderConfig, where: str) -> list[Problem]:
    """Every number in which the `config.json` of a Hub directory differs from the network that was asked for."""
    wanted = attrs.asdict(asked)
    return [
        Problem("model", f"it has {name}={wanted[name]}, but {where}/config.json says {value}")
        for name, value in attrs.asdict(stored).items()
        if value != wanted[name]
    ]


@attrs.frozen(eq=False)
class Blueprint:
    """A program without devices.

    Attributes:
        experiment: What was asked for.
        config: The network's numbers.
        compute: Dtype of activations and products.
        base_template: The network as it is published: neither adapted nor quantised.
        policy: The model that is trained.
        reference: The model that it is compared with, or None where the objective needs none.
        trainable: Leaves that are trained, by path.
        frozen: Leaves of the policy that are not.
        copied: Leaves of a reference that is a copy of its own (full fine-tuning), else empty.
        update: The optax transformation.
        layout: Where everything lives.
    """

    experiment: Experiment
    config: DecoderConfig
    compute: jnp.dtype
    base_template: Template
    policy: Template
    reference: Template | None
    trainable: Mapping[str, Leaf]
    frozen: Mapping[str, Leaf]
    copied: Mapping[str, Leaf]
    update: optax.GradientTransformation
    layout: Layout

    @property
    def base(self) -> Mapping[str, Leaf]:
        """Leaves of the published network, by path."""
        return self.base_template.variables

    @property
    def parameters(self) -> dict[str, int]:
        """Numbers of parameters: of the published network, of those that are trained."""
        return {"total": _size(self.base), "trainable": _size(self.trainable)}


def draw(experiment: Experiment, platform: str = "cpu") -> Blueprint:
    """The blueprint of an experiment.

    Args:
        experiment: What is asked for.
        platform: "cpu", "gpu" or "tpu": what `Precision.compute="auto"` goes by.

    Raises:
        PlanError: with everything that does not fit.
    """
    config = architecture(experiment.model)
    adapter, quantization = experiment.adapter, experiment.quantization
    compute, kept = dtypes(experiment, platform)

    def template(adapter: object, quantization: object) -> Template:
        change = adapters.adapt(adapter, quantization, config)  # pyright: ignore[reportArgumentType]
        return abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=kept, adapt=change))

    base = template(None, None)
    problems = adapters.problems(adapter, quantization, base.variables) + _length_problems(experiment, config)
    if problems:
        raise PlanError(problems, f"Experiment '{experiment.name}'")
    policy = template(adapter, quantization) if adapter or quantization else base
    problems = adapters.missed(adapter, quantization, policy, base.variables)
    trained = {path for path in policy.variables if adapter is None or adapters.is_adapter(path)}
    trainable = {
        p: attrs.evolve(policy.variables[p], dtype=jnp.dtype("float32")) for p in policy.variables if p in trained
    }
    frozen = {path: leaf for path, leaf in policy.variables.items() if path not in trained}
    if not trainable and not problems:
        problems.append(Problem("adapter", f"{type(adapter).__qualname__} adds nothing to train"))
    reference = None
    if experiment.objective.needs_reference:
        reference = template(None, quantization) if quantization else base
    copied = (
        {p: attrs.evolve(leaf, dtype=compute) for p, leaf in base.variables.items()} if reference and not frozen else {}
    )
    update = _update(experiment, trainable)
    layout = _layout(experiment, frozen, trainable, copied, update)
    problems += layout.problems() + layout.batch_problems(experiment.rows_at_once)
    if problems:
        raise PlanError(problems, f"Experiment '{experiment.name}'")
    return Blueprint(experiment, config, compute, base, policy, reference, trainable, frozen, copied, update, layout)


def dtypes(experiment: Experiment, platform: str) -> tuple[jnp.dtype, jnp.dtype]:
    """Dtypes that are computed in, and that frozen weights are kept in."""
    precision = experiment.precision
    compute = precision.compute
    if compute == "auto":
        compute = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(compute), jnp.dtype(compute if precision.frozen == "auto" else precision.frozen)


def _update(experiment: Experiment, trainable: Mapping[str, Leaf]) -> optax.GradientTransformation:
    curve = optimizer.learning_rate(experiment.optimizer.schedule, experiment.steps)
    matrices = {path: len([axis for axis in leaf.axes if axis != "layers"]) > 1 for path, leaf in trainable.items()}
    return optimizer.build(experiment.optimizer, curve, matrices)


def _layout(
    experiment: Experiment,
    frozen: Mapping[str, Leaf],
    trainable: Mapping[str, Leaf],
    copied: Mapping[str, Leaf],
    update: optax.GradientTransformation,
) -> Layout:
    layout = Layout(experiment.mesh)
    for part, leaves in (("frozen", frozen), ("trainable", trainable), ("reference", copied)):
        for path, leaf in leaves.items():
            layout.add(part, path, leaf.shape, leaf.dtype, leaf.axes)
    for path, shape, axes in optimizer_leaves(update, trainable):
        layout.add("optimizer", path, shape.shape, shape.dtype, axes)
    return layout


def optimizer_leaves(
    update: optax.GradientTransformation, trainable: Mapping[str, Leaf]
) -> list[tuple[str, jax.ShapeDtypeStruct, Axes]]:
    """Every array of the optimizer's state: its path, its shape, and the logical axes of its parameter."""
    params = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in trainable.items()}
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.eval_shape(update.init, params))
    found: list[tuple[str, jax.ShapeDtypeStruct, Axes]] = []
    for keys, leaf in leaves:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        owner = getattr(keys[-1], "key", None)
        own = trainable.get(owner) if isinstance(owner, str) else None
        found.append((path, leaf, own.axes if own and own.shape == leaf.shape else (None,) * len(leaf.shape)))
    return found


def _length_problems(experiment: Experiment, config: DecoderConfig) -> list[Problem]:
    sources: list[tuple[str, Data]] = [("data", experiment.data)]
    if experiment.evaluation is not None and experiment.evaluation.data is not None:
        sources.append(("evaluation.data", experiment.evaluation.data))
    limit, size = config.max_length, type(experiment.model).__qualname__
    found: list[Problem] = []
    for where, data in sources:
        if isinstance(data, Preferences) and data.max_prompt_length + data.max_response_length > limit:
            together = data.max_prompt_length + data.max_response_length
            message = f"prompt and response may take {together} tokens, {size} reads at most {limit}"
            found.append(Problem(f"{where}.max_prompt_length", message))
        elif isinstance(data, Conversations | Text) and data.max_length > limit:
            found.append(Problem(f"{where}.max_length", f"{data.max_length} tokens, {size} reads at most {limit}"))
    if experiment.evaluation is not None and experiment.evaluation.max_new_tokens >= limit:
        message = (
            f"{experiment.evaluation.max_new_tokens} tokens leave no room for a prompt, {size} reads at most {limit}"
        )
        found.append(Problem("evaluation.max_new_tokens", message))
    return found


def _size(leaves: Mapping[str, Leaf]) -> int:
    return sum(math.prod(leaf.shape) for leaf in leaves.values())
