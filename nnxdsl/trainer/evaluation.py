"""Evaluation: held-out metrics, and completions of policy and reference for the same prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import attrs
import jax
import numpy as np

from nnxdsl.adapters import lora_math
from nnxdsl.config.evaluation import Evaluation
from nnxdsl.data.batch import PairBatch, SequenceBatch
from nnxdsl.data.dataset import Dataset
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.prompts import Prompts
from nnxdsl.data.sampler import Rows, ordered
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.encode import Encoder, stop_ids
from nnxdsl.errors import DataError, PlanError, Problem
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.losses.base import WeightedMean, means
from nnxdsl.models.params import AbstractModel
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.program.forward import Leaves
from nnxdsl.rollouts.rollouts import Rollouts


class Sample(NamedTuple):
    """Completions of policy and reference for one prompt; `reference` is None where the objective has none."""

    prompt: str
    policy: str
    reference: str | None


@attrs.define
class Evaluator:
    """Evaluates a program as an `Evaluation` configures it.

    Attributes:
        program: The program.
        evaluation: When and how.
        dataset: Its held-out rows, or None.
        tokenizer: Of prompts and answers.
        is_chat: Whether prompts are a user's turn in the chat template.
        rollouts: Generates completions of held-out prompts, where the objective trains on completions; else None.

    Raises:
        PlanError: Prompts that the model cannot read, and settings that do not fit it, all at once.
    """

    program: Program
    evaluation: Evaluation
    dataset: Dataset | None
    tokenizer: TokenizerBase
    is_chat: bool
    rollouts: Rollouts | None = None
    _prompts: list[list[int]] = attrs.field(init=False)
    _samplers: dict[str, Sampler] = attrs.field(factory=dict, init=False)
    _reference_completions: list[str] | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._prompts = _encode_prompts(self)

    def prepare(self, state: TrainState, own_weights: Leaves | None = None) -> None:
        """Generates the reference's completions if its weights will be gone: those before any step, or its own.

        Args:
            state: The state before any step.
            own_weights: The reference's weights where it has its own, which are not part of the state.
        """
        is_cached = self.program.blueprint.reference.is_precomputed
        template = self.program.blueprint.reference.template
        if own_weights is not None and template is not None and self.evaluation.prompts:
            (self._reference_completions,) = self._generate("reference", template, own_weights)
        elif self.evaluation.prompts and is_cached and self.program.reference(state) is None:
            (self._reference_completions,) = self._generate("policy", *self.program.policy(state))

    def metrics(self, state: TrainState, should_stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """Means over all held-out rows, each sum divided once; names begin with `eval/`. Empty without held-out data.

        Args:
            state: What is evaluated.
            should_stop: Called before each batch; once it returns True, the rest is left out and the result is None.
        """
        if isinstance(self.dataset, Prompts):
            assert self.rollouts is not None
            metrics = self.rollouts.evaluate(state, self.dataset, self._order(), should_stop)
            return None if metrics is None else {f"eval/{name}": value for name, value in metrics.items()}
        sums: list[dict[str, WeightedMean]] = []
        computing: dict[str, WeightedMean] = {}
        for batch in self._batches():
            if should_stop():
                return None
            following = self.program.evaluate(state, batch)
            sums.append(jax.device_get(computing))  # read while the next one is computed
            computing = following
        return {f"eval/{name}": mean for name, mean in means([*sums, jax.device_get(computing)]).items()}

    def samples(self, state: TrainState) -> list[Sample]:
        """Completions of the evaluation's prompts. Those of the reference are generated once, unless it is synced."""
        prompts = self.evaluation.prompts
        if not prompts:
            return []
        if self.program.blueprint.reference.is_synced:
            self._reference_completions = None
        policy = self._policy_completions(state)
        answers: Sequence[str | None] = self._reference_completions or [None] * len(prompts)
        return [Sample(*texts) for texts in zip(prompts, policy, answers, strict=True)]

    def _policy_completions(self, state: TrainState) -> list[str]:
        """The policy's completions; generates the reference's as well, if its weights are still there."""
        template, leaves = self.program.policy(state)
        reference = self.program.reference(state)
        has_own_weights = self.program.blueprint.reference.has_own_weights
        is_one = self.program.blueprint.reference.exists and not has_own_weights
        if is_one and int(state.step) == 0:  # before any step
            self._reference_completions = self._reference_completions or self._generate("policy", template, leaves)[0]
            return self._reference_completions
        if reference is None or self._reference_completions is not None:
            return self._generate("policy", template, leaves)[0]
        if not has_own_weights and any(lora_math.is_adapter(path) for path in leaves):
            off = lora_math.disable_adapter(leaves) if self.program.blueprint.reference.is_base else reference[1]
            policy, self._reference_completions = self._generate("policy", template, leaves, off)
            return policy
        (self._reference_completions,) = self._generate("reference", *reference)
        return self._generate("policy", template, leaves)[0]

    def _generate(self, name: str, template: AbstractModel, *models: Leaves) -> list[list[str]]:
        """Completions of several models of one structure, generated together."""
        blueprint, evaluation = self.program.blueprint, self.evaluation
        if name not in self._samplers:
            stops = stop_ids(self.tokenizer)
            config, compute = blueprint.config, blueprint.compute
            self._samplers[name] = Sampler(template, config, compute, stops, whole=self.program.replicated)
        sampling = Sampling(
            evaluation.max_new_tokens,
            evaluation.temperature,
            evaluation.top_k,
            evaluation.top_p,
            self.program.experiment.seed,
            evaluation.num_speculative_tokens,
        )
        completions = self._samplers[name].sample_models(models, self._prompts, sampling)
        return [[self.tokenizer.decode(ids) for ids in answers] for answers in completions]

    def _batches(self) -> Iterator[PairBatch | SequenceBatch]:
        """All held-out rows in their order, in batches which every mesh of the experiment can split."""
        size, rows = self.program.blueprint.forward_batch_size, self._order()
        for start in range(0, len(rows), size):
            assert self.dataset is not None
            yield self.dataset.read_batch(rows[start : start + size], size, self.program.reads)

    def is_due(self, step: int, total: int) -> bool:
        """Whether the state after `step` of `total` steps is evaluated."""
        return step == total or step % (self.evaluation.every_steps or total) == 0

    @property
    def batch_count(self) -> int:
        """Batches of `metrics`, before each of which `should_stop` is called."""
        blueprint, is_generated = self.program.blueprint, isinstance(self.dataset, Prompts)
        size = blueprint.experiment.batch_size if is_generated else blueprint.forward_batch_size
        return math.ceil(len(self._order()) / size)

    def _order(self) -> Rows:
        """[rows] the held-out rows as their data orders them: each once, and the same at every evaluation."""
        if self.dataset is None:
            return np.arange(0)
        data = self.evaluation.data or self.program.experiment.data
        return ordered(data.order, len(self.dataset), self.program.experiment.seed, epoch=0)


def _encode_prompts(evaluator: Evaluator) -> list[list[int]]:
    """The prompts as ids, each with room for its answer."""
    encoder = Encoder.of(evaluator.tokenizer, evaluator.program.experiment.data)
    evaluation = evaluator.evaluation
    config = evaluator.program.blueprint.config
    limit = config.max_length
    prompts: list[list[int]] = []
    problems: list[Problem] = []
    for index, text in enumerate(evaluation.prompts):
        try:
            ids = encoder.prompt([{"role": "user", "content": text}] if evaluator.is_chat else text)
        except (RowError, DataError) as error:
            problems.append(Problem(f"evaluation.prompts.{index}", str(error)))
            continue
        if len(ids) + evaluation.max_new_tokens > limit:
            message = (
                f"{len(ids):,} tokens and {evaluation.max_new_tokens:,} new ones are more than the model's {limit:,} "
                f"positions; shorten it, or lower evaluation.max_new_tokens"
            )
            problems.append(Problem(f"evaluation.prompts.{index}", message))
        elif message := config.generation_problem(len(ids), evaluation.max_new_tokens):
            problems.append(Problem(f"evaluation.prompts.{index}", f"{message}; lower evaluation.max_new_tokens"))
        prompts.append(ids)
    if evaluation.top_k is not None and evaluation.top_k >= config.vocab_size:
        message = f"{evaluation.top_k:,} has no effect on a vocabulary of {config.vocab_size:,}; use None"
        problems.append(Problem("evaluation.top_k", message))
    if problems:
        raise PlanError(problems, f"Experiment '{evaluator.program.experiment.name}'")
    return prompts
