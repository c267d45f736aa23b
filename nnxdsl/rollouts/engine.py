"""The engine that samples completions with the weights that are trained, on the same devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nnxdsl.config.objectives.online import Online
from nnxdsl.generate.sampler import Completion, Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.program.compile import Program, TrainState


class Engine:
    """Samples with the policy of a program, as its objective says; a draw depends on weights, prompt and seed alone.

    Args:
        program: Of an experiment whose objective is `Online`.
        stop_ids: Token ids that end a completion.
    """

    def __init__(self, program: Program, stop_ids: Collection[int]) -> None:
        self._program, self._stop_ids = program, stop_ids
        self._sampler: Sampler | None = None

    def sample(
        self,
        state: TrainState,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        seed: int,
        *,
        prompt_length: int,
        max_completion_length: int,
    ) -> list[Completion]:
        """A completion of each prompt; those of equal prompts are different draws.

        Args:
            state: Whose policy answers.
            prompts: Token ids.
            limits: Most tokens of each completion.
            seed: Of the draws.
            prompt_length: Least padded length of prompts; calls of one length share what is compiled.
            max_completion_length: Most tokens of any completion.
        """
        program = self._program
        objective, blueprint = program.experiment.objective, program.blueprint
        assert isinstance(objective, Online)
        template, leaves = program.policy(state)
        if self._sampler is None:
            arrays = blueprint.config, blueprint.compute, self._stop_ids, program.batch_sharding, program.replicated
            self._sampler = Sampler(template, *arrays)
        drawn = objective.temperature, objective.top_k, objective.top_p
        sampling = Sampling(max_completion_length, *drawn, seed, objective.num_speculative_tokens)
        return self._sampler.complete(leaves, prompts, sampling, prompt_length=prompt_length, limits=limits)
