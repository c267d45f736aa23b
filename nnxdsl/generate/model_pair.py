"""A run's policy at one checkpoint and the model it is compared with, both evaluated with training's forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.adapters import lora_math
from nnxdsl.config.core.serialization import evolve
from nnxdsl.config.data import Data, FileData, Mixture
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.sharding import Mesh
from nnxdsl.data.batch import Batch
from nnxdsl.data.dataset import Dataset
from nnxdsl.data.loaders.build import load_of
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.loaders.sources import source_rows
from nnxdsl.data.loaders.token_cache import TOKENS, TokenCache
from nnxdsl.data.split import train_test_split
from nnxdsl.data.tokenizers.base import TokenizerBase, open_tokenizer
from nnxdsl.data.tokenizers.encode import Encoder, stop_ids
from nnxdsl.errors import DataError, RunError, WeightsError
from nnxdsl.generate.sampler import Sampler
from nnxdsl.losses.base import PairLogps
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.attention.row_layout import sequence
from nnxdsl.models.params import AbstractModel
from nnxdsl.program import init, precomputed, xla_options
from nnxdsl.program.checkpoint_views import checkpoint_targets
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.program.compile import compile as compile_experiment
from nnxdsl.program.forward import ForwardOutput, Leaves
from nnxdsl.program.reference import OwnWeights
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.saved_experiment import saved_experiment
from nnxdsl.weights import sources

REFERENCE = "reference"
"""Default comparison: the reference model."""

UNTRAINED = "before training"
"""Default comparison where the objective has no reference: the initial policy."""

ALTERNATIVES = 5
PIECE = 32
"""Tokens per chunk; full-vocabulary logits are materialized for one chunk at a time."""

PROBE = "The quick brown fox, 0123456789 (äöü, 漢字)\n\tdef f(x): return x != {}"
"""Two tokenizers that give the same ids for this text are treated as equal."""

LOOKED_AT = 32
"""Number of rows inspected to detect chat data."""


@attrs.frozen(eq=False)
class Comparison:
    """The model that a policy is compared with.

    Attributes:
        name: "reference", "before training" where the objective has no reference, "step N", or "RUN, step N".
        template: The abstract model.
        leaves: Its arrays, in the compute dtype.
        read: Forward pass over a batch.
    """

    name: str
    template: AbstractModel
    leaves: Leaves
    read: Callable[[Batch], ForwardOutput]


@attrs.frozen(eq=False)
class ModelPair:
    """Policy and comparison model of one run, on this machine's first device.

    Attributes:
        directory: Run directory.
        step: Optimizer step of the policy; 0 for the initial policy.
        program: The run's program, on one device.
        policy: State at that step, without optimizer state.
        first: State before the first step.
        other: The model that the policy is compared with.
        tokenizer: Shared by both models.
        held_out: The evaluation dataset; None if there is none.
        is_chat: Whether prompts are formatted as a user turn with the chat template.
        compiled: Generation settings that are already compiled, so that timings exclude compilation.
    """

    directory: Path
    step: int
    program: Program
    policy: TrainState
    first: TrainState
    other: Comparison
    tokenizer: TokenizerBase
    held_out: Dataset | None
    is_chat: bool
    compiled: set[tuple[object, ...]] = attrs.field(factory=set, init=False)
    _samplers: dict[str, Sampler] = attrs.field(factory=dict, init=False)
    _jitted: dict[str, Any] = attrs.field(factory=dict, init=False)

    @classmethod
    def open(
        cls, directory: Path, step: int, against: str = REFERENCE, tell: Callable[[str], object] = lambda stage: None
    ) -> ModelPair:
        """Load the weights of both models.

        Relative paths in the experiment are resolved against the current working directory.

        Args:
            directory: Run directory.
            step: A checkpointed step, or 0 for the initial policy.
            against: "reference", another step, or `RUN@STEP`: a step of another run in the same home directory, with
                the same architecture.
            tell: Progress callback, called with a message.

        Raises:
            RunError: the run is a reward model, the run or step does not exist, the checkpoint is damaged, or the other
                run has another architecture or tokenizer.
            WeightsError: the initial weights no longer exist.
            DataError: the held-out rows or the tokenizer cannot be read.
        """
        experiment = saved_experiment(directory)
        if not experiment.objective.reads_logps:
            raise RunError(f"{directory} is a reward model, which writes no text; see nnxdsl.load(...).rewards")
        with CheckpointReader(directory / "checkpoints") as checkpoints:
            steps = checkpoints.steps()
            if not steps:
                raise WeightsError(f"{directory} has no checkpoint yet")
            # The dtype that the run resolved for its device, which this machine may not have.
            compute = checkpoints.meta(steps[-1])["identity"]["compute"]
            program = compile_experiment(evolve(experiment, {"mesh": Mesh(), "precision.compute": compute}))
            tell("reading weights")
            source, home = sources.open_source(program.blueprint, directory.parent), directory.parent
            saved = _Saved.read(directory, program, checkpoints, source, tell)
            state, at_step = saved.state, saved.at_step
            first, policy = at_step(0), at_step(step)
            if "@" in against:
                other = _of_run(program, home, against, tell)
            elif against != REFERENCE:
                if not against.isdigit():
                    raise RunError(f"expected 'reference', a step, or RUN@STEP, got {against!r}")
                other = _of_state(program, f"step {int(against)}", at_step(int(against)))
            elif program.blueprint.reference.has_own_weights:
                tell("reading the reference's weights")
                other = _own_reference(program, precomputed.load_reference(program, source))
            elif program.blueprint.reference.is_synced and step:
                other = _of_state(program, REFERENCE, at_step(step, "reference"))
            elif not program.blueprint.reference.exists:
                other = _of_state(program, UNTRAINED, first)
            else:
                is_base = program.blueprint.reference.is_base
                base = lora_math.disable_adapter(first.trainable) if is_base else first.trainable
                other = _of_state(program, REFERENCE, state(0, base))
        tell("reading held-out rows")
        tokenizer = _tokenizer(experiment, home)
        data = None if experiment.evaluation is None else experiment.evaluation.data
        held_out = None if data is None else _loaded(program, data, tokenizer, home)
        if experiment.test_size is not None:
            _, held_out = train_test_split(_loaded(program, experiment.data, tokenizer, home), experiment.test_size)
        is_chat = _is_chat(experiment.data) if held_out is None else held_out.is_chat
        return cls(directory, step, program, policy, first, other, tokenizer, held_out, is_chat)

    @property
    def encoder(self) -> Encoder:
        """Encoder of prompts and completions into token ids."""
        return Encoder.of(self.tokenizer, self.program.experiment.data)

    def read(self, batch: Batch) -> tuple[ForwardOutput, ForwardOutput]:
        """Outputs of the policy and of the other model; equal models share a compiled program and agree bit for bit."""
        return self.program.score(self.policy, batch), self.other.read(batch)

    def models(self) -> dict[str, tuple[AbstractModel, Leaves]]:
        """Templates and arrays for generation, by "policy" and "other"."""
        return {"policy": self.program.policy(self.policy), "other": (self.other.template, self.other.leaves)}

    def sampler(self, name: str) -> Sampler:
        """The sampler of "policy" or "other"; models of the same structure share one, and so its compiled program."""
        blueprint, (template, _) = self.program.blueprint, self.models()[name]
        kind = "policy" if template is self.program.policy_loss.policy else name
        if kind not in self._samplers:
            self._samplers[kind] = Sampler(template, blueprint.config, blueprint.compute, stop_ids(self.tokenizer))
        return self._samplers[kind]

    def rewards(self, policy: PairLogps, other: PairLogps) -> dict[str, np.ndarray]:
        """Compute the objective's metrics for each pair separately, `[B]`; NaN where a metric is undefined for a pair.

        Args:
            policy: Log-probabilities under the policy.
            other: Log-probabilities under the other model; ignored by objectives without a reference.
        """
        compares, loss = self.program.blueprint.reference.exists, self.program.policy_loss.loss.objective

        def each(policy: PairLogps, other: PairLogps) -> dict[str, jax.Array]:
            def of_one(weight: jax.Array) -> dict[str, jax.Array]:
                metrics = loss(policy, other if compares else None, weight).metrics
                return {
                    name: jnp.where(ratio.count > 0, ratio.total / jnp.maximum(ratio.count, 1e-9), jnp.nan)
                    for name, ratio in metrics.items()
                }

            return jax.vmap(of_one)(jnp.eye(len(policy.chosen_logps)))

        if "rewards" not in self._jitted:
            self._jitted["rewards"] = jax.jit(each)
        rewards = {name: np.asarray(value) for name, value in self._jitted["rewards"](policy, other).items()}
        if {"rewards/chosen", "rewards/rejected"} <= rewards.keys() and "rewards/margins" not in rewards:
            rewards["rewards/margins"] = rewards["rewards/chosen"] - rewards["rewards/rejected"]
        return rewards

    def alternatives(self, ids: Sequence[int]) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Compute the top 5 next tokens at each position under each model.

        Args:
            ids: Token ids of a text, length T.

        Returns:
            For "policy" and "other", the model's top token ids with their log-probabilities (nats) under the policy
            and under the other model, each `[T, 5]`. Row t predicts token t + 1.
        """
        forward, config = self.program.policy_loss.forward, self.program.blueprint.config
        templates = {name: template for name, (template, _) in self.models().items()}
        count = min(ALTERNATIVES, config.vocab_size)

        def top_alternatives(leaves: dict[str, Leaves], tokens: jax.Array, length: jax.Array) -> dict[str, Any]:
            width = tokens.shape[1]
            models = {name: forward.model(templates[name], part) for name, part in leaves.items()}
            method, places = forward.kernels.method(sequence(width)), positions_right_padded(length, width)
            hidden = {
                name: model(tokens, places, dtype=forward.dtype, method=method)
                .hidden[0]
                .reshape(-1, PIECE, config.embed_dim)
                for name, model in models.items()
            }

            def piece(states: dict[str, jax.Array]) -> dict[str, Any]:
                temperature = forward.head.temperature
                logp = {
                    name: jax.nn.log_softmax(models[name].logits(part).astype(jnp.float32) / temperature)
                    for name, part in states.items()
                }
                pieces = {}
                for name, own_logp in logp.items():
                    _, best = jax.lax.top_k(own_logp, count)
                    pieces[name] = (best, *(jnp.take_along_axis(logp[side], best, -1) for side in ("policy", "other")))
                return pieces

            whole = jax.lax.map(piece, hidden)
            return jax.tree.map(lambda x: x.reshape(-1, count), whole)

        if "alternatives" not in self._jitted:
            self._jitted["alternatives"] = xla_options.jit(top_alternatives)
        tokens = np.zeros((1, -(-len(ids) // PIECE) * PIECE), np.int32)
        tokens[0, : len(ids)] = ids
        leaves = {name: part for name, (_, part) in self.models().items()}
        alternatives = self._jitted["alternatives"](leaves, tokens, np.array([len(ids)], np.int32))
        return {name: tuple(np.asarray(part)[: len(ids)] for part in parts) for name, parts in alternatives.items()}  # pyright: ignore[reportReturnType]


@attrs.frozen(eq=False)
class _Saved:
    """Policy states of a run, restored from its checkpoints."""

    directory: Path
    program: Program
    checkpoints: CheckpointReader
    trainable: Leaves
    frozen: Leaves
    tell: Callable[[str], object]

    @classmethod
    def read(
        cls,
        directory: Path,
        program: Program,
        checkpoints: CheckpointReader,
        source: Any,
        tell: Callable[[str], object],
    ) -> _Saved:
        """Load the initial weights."""
        trainable, frozen, _ = init.init_arrays(program.blueprint, source, program.mesh)
        return cls(directory, program, checkpoints, trainable, frozen, tell)

    def state(self, number: int, leaves: Leaves) -> TrainState:
        index = jnp.asarray(number, jnp.int32)
        return TrainState(index, init.sort_like(leaves, self.program.blueprint.trainable), None, self.frozen, {})

    def at_step(self, number: int, group: str = "trainable") -> TrainState:
        steps = self.checkpoints.steps()
        if number == 0:
            return self.state(0, self.trainable)
        if number not in steps:
            raise RunError(f"{self.directory} has no checkpoint of step {number}; there are {steps}")
        self.tell(f"reading the checkpoint of step {number} of {self.directory.name}")
        arrays = self.checkpoints.restore(number, {group: checkpoint_targets(self.program)[group]})[group]
        return self.state(number, arrays)


def _of_run(mine: Program, home: Path, against: str, tell: Callable[[str], object]) -> Comparison:
    """Load the policy of another run, evaluated with this run's forward pass.

    Args:
        mine: Program of this run.
        home: Home directory of both runs.
        against: `RUN@STEP`.
        tell: Progress callback, called with a message.

    Raises:
        RunError: the run or step does not exist, or its architecture or tokenizer differs.
    """
    run, _, step = against.rpartition("@")
    directory = home / run
    if not step.isdigit() or not run or "/" in run or run.startswith(".") or not (directory / "run.json").is_file():
        raise RunError(f"expected RUN@STEP with a run of {home}, got {against!r}")
    experiment = saved_experiment(directory)
    compute = mine.blueprint.compute.name
    program = compile_experiment(evolve(experiment, {"mesh": Mesh(), "precision.compute": compute}))
    ids = [_tokenizer(one, home).encode(PROBE) for one in (mine.experiment, program.experiment)]
    if program.blueprint.config != mine.blueprint.config or ids[0] != ids[1]:
        raise RunError(f"{run} has another architecture or tokenizer; a per-token comparison needs the same ones")
    tell(f"reading weights of {run}")
    with CheckpointReader(directory / "checkpoints") as checkpoints:
        source = sources.open_source(program.blueprint, home)
        state = _Saved.read(directory, program, checkpoints, source, tell).at_step(int(step))
    template, leaves = program.policy(state)
    forward = mine.policy_loss.forward
    read = xla_options.jit(lambda leaves, batch: forward.read(forward.model(template, leaves), batch))
    return Comparison(f"{run}, step {int(step)}", template, leaves, lambda batch: read(leaves, mine.shard_batch(batch)))


def _tokenizer(experiment: Experiment, home: Path) -> TokenizerBase:
    owner = sources.tokenizer_owner(experiment)
    return open_tokenizer(owner.model.tokenizer, sources.tokenizer_directory(owner, home))


def _of_state(program: Program, name: str, state: TrainState) -> Comparison:
    template, leaves = program.policy(state)
    return Comparison(name, template, leaves, lambda batch: program.score(state, batch))


def _own_reference(program: Program, leaves: Leaves) -> Comparison:
    """A reference with its own weights, evaluated as in training."""
    reference = program.policy_loss.reference
    assert isinstance(reference, OwnWeights)
    template, forward = reference.template, reference.forward
    assert template is not None
    assert forward is not None
    read = xla_options.jit(lambda leaves, batch: forward.read(forward.model(template, leaves), batch))
    return Comparison(REFERENCE, template, leaves, lambda batch: read(leaves, program.shard_batch(batch)))


def _loaded(program: Program, data: Data, tokenizer: TokenizerBase, home: Path) -> Dataset:
    config, cache = program.blueprint.config, TokenCache(home / TOKENS)
    limits = {"max_position": config.max_length, "vocabulary": config.vocab_size}
    return load_of(program.experiment, data, tokenizer, cache=cache, **limits)


def _is_chat(data: Data) -> bool:
    """Whether the first rows of a file contain chat messages; False if it can no longer be read."""
    source = data.parts[0] if isinstance(data, Mixture) else data
    if not isinstance(source, FileData):
        return False
    try:
        rows = [row.value for row, _ in zip(source_rows(source), range(LOOKED_AT), strict=False)]
    except DataError:
        return False
    values = [value for row in rows if not isinstance(row, RowError) for value in row.values()]
    return any(isinstance(value, list) and value and isinstance(value[0], dict) for value in values)
