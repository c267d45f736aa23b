"""Held-out metrics, and answers of policy and reference to the same prompts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import attrs
import jax
import numpy as np

from nnxdsl.data.batch import PairBatch, SequenceBatch
from nnxdsl.data.dataset import Dataset
from nnxdsl.data.encode import Encoder, stop_ids
from nnxdsl.data.tokenizer import TokenizerBase
from nnxdsl.program.compiler import Program, State
from nnxdsl.run.generate import Sampler, Sampling
from nnxdsl.spec.cadence import Evaluation


class Sample(NamedTuple):
    """What policy and reference answer to one prompt; `reference` is None where the objective has none."""

    prompt: str
    policy: str
    reference: str | None


@attrs.define
class Evaluator:
    """Evaluates a program as an `Evaluation` asks.

    Attributes:
        program: The program.
        evaluation: What was asked for.
        dataset: Its held-out rows, or None.
        tokenizer: Of prompts and answers.
        is_chat: Whether prompts are a user's turn in the chat template.
    """

    program: Program
    evaluation: Evaluation
    dataset: Dataset | None
    tokenizer: TokenizerBase
    is_chat: bool
    _samplers: dict[str, Sampler] = attrs.field(factory=dict, init=False)
    _reference_answers: list[str] | None = attrs.field(default=None, init=False)

    def metrics(self, state: State) -> dict[str, float]:
        """Means over all held-out rows, each sum divided once; names begin with `eval/`. Empty without held-out data."""
        if self.dataset is None:
            return {}
        totals: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        pending = [self.program.evaluate(state, batch) for batch in self._batches(self.dataset)]
        for ratios in pending:
            for name, ratio in jax.device_get(ratios).items():
                totals[name][0] += float(ratio.total)
                totals[name][1] += float(ratio.count)
        return {f"eval/{name}": total / count if count else math.nan for name, (total, count) in totals.items()}

    def samples(self, state: State) -> list[Sample]:
        """Answers to the evaluation's prompts. The reference does not change, so it is asked once."""
        prompts = self.evaluation.prompts
        if not prompts:
            return []
        policy = self._answers("policy", *self.program.policy(state))
        reference = self.program.reference(state)
        if reference is not None and self._reference_answers is None:
            self._reference_answers = self._answers("reference", *reference)
        answers: Sequence[str | None] = self._reference_answers or [None] * len(prompts)
        return [Sample(*texts) for texts in zip(prompts, policy, answers, strict=True)]

    def _answers(self, name: str, template: object, leaves: dict[str, jax.Array]) -> list[str]:
        blueprint = self.program.blueprint
        if name not in self._samplers:
            stops = stop_ids(self.tokenizer)
            self._samplers[name] = Sampler(template, blueprint.config, blueprint.compute, stops)  # pyright: ignore[reportArgumentType]
        encoder = Encoder(self.tokenizer)
        prompts = [
            encoder.prompt([{"role": "user", "content": text}] if self.is_chat else text)
            for text in self.evaluation.prompts
        ]
        sampling = Sampling(self.evaluation.max_new_tokens, self.evaluation.temperature, self.program.experiment.seed)
        return [self.tokenizer.decode(ids) for ids in self._samplers[name](leaves, prompts, sampling)]

    def _batches(self, dataset: Dataset) -> Iterator[PairBatch | SequenceBatch]:
        size = self.program.experiment.microbatch_size or self.program.experiment.batch_size
        for start in range(0, len(dataset), size):
            yield dataset.batch(np.arange(start, min(start + size, len(dataset))), size)
