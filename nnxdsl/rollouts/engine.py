"""What samples completions: its interface, the choice of one, and sampling on the devices that train."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from functools import singledispatch
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nnxdsl.config.objectives.engine import Engine as EngineSpec
from nnxdsl.config.objectives.online import Online
from nnxdsl.errors import NotRegisteredError
from nnxdsl.generate.sampler import Completion, Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.models.params import AbstractModel
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.program.forward import Leaves


class Requests(NamedTuple):
    """Completions that are asked for.

    Attributes:
        prompts: Token ids; completions of equal prompts are different draws.
        limits: Most tokens of each completion.
        seed: Of the draws.
        batch_size: At least the number of prompts; requests of one size and length share what is compiled.
        prompt_length: Least padded length of prompts.
        max_completion_length: Most tokens of any completion.
    """

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    seed: int
    batch_size: int
    prompt_length: int
    max_completion_length: int


class Engine(Protocol):
    """Samples with the policy of a program, as its objective says."""

    @property
    def max_logp_difference(self) -> float | None:
        """Most nats by which its log-probabilities may be from the trainer's in the mean; None where they are one."""
        ...

    def weights(self, state: TrainState) -> Any:
        """What `sample` samples with: the policy of a state, which may be gone once `sample` is called."""
        ...

    def sample(self, weights: Any, requests: Requests) -> list[Completion]:
        """A completion of each prompt, with what `weights` has returned."""
        ...

    def close(self) -> None:
        """Ends what is sampled, and deletes what was written; called once at the end of a run."""
        ...


def seed_of(text: str) -> int:
    """The seed of draws that a text names, below 2^32."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


@singledispatch
def build(engine: EngineSpec | None, program: Program, stop_ids: Collection[int], home: Path) -> Engine:
    """Makes an engine; register an `Engine` of your own here.

    Args:
        engine: That of the objective; None for the devices that train.
        program: Of an experiment whose objective is `Online`.
        stop_ids: Token ids that end a completion.
        home: The directory of runs.
    """
    name = type(engine).__qualname__
    raise NotRegisteredError(
        f"no engine is registered for {name}; write\n"
        f"  from nnxdsl.rollouts import engine\n"
        f"  @engine.build.register({name.rpartition('.')[2]})\n"
        f"  def _(spec, program, stop_ids, home): return ...  # with the method `sample` of engine.Engine"
    )


@build.register
def _(engine: None, program: Program, stop_ids: Collection[int], home: Path) -> Engine:
    return OwnEngine(program, stop_ids)


class OwnEngine:
    """Samples on the devices that train, with their weights; a draw depends on weights, prompt and seed alone.

    Args:
        program: Of an experiment whose objective is `Online`.
        stop_ids: Token ids that end a completion.
    """

    max_logp_difference = None

    def __init__(self, program: Program, stop_ids: Collection[int]) -> None:
        self._program, self._stop_ids = program, stop_ids
        self._sampler: Sampler | None = None

    def weights(self, state: TrainState) -> tuple[AbstractModel, Leaves]:
        """The policy itself: it samples before the state is donated."""
        return self._program.policy(state)

    def sample(self, weights: tuple[AbstractModel, Leaves], requests: Requests) -> list[Completion]:
        """See `Engine.sample`."""
        program = self._program
        objective, blueprint = program.experiment.objective, program.blueprint
        assert isinstance(objective, Online)
        template, leaves = weights
        if self._sampler is None:
            arrays = blueprint.config, blueprint.compute, self._stop_ids, program.batch_sharding, program.replicated
            self._sampler = Sampler(
                template, *arrays, kv_cache_dtype=objective.kv_cache_dtype, returns_experts=objective.router_replay
            )
        settings = objective.temperature, objective.top_k, objective.top_p
        drafts = objective.num_speculative_tokens
        sampling = Sampling(requests.max_completion_length, *settings, requests.seed, drafts)
        count = len(requests.prompts)
        fill = requests.batch_size - count
        rows = [*requests.prompts, *[requests.prompts[0]] * fill]
        limits = [*requests.limits, *[requests.limits[0]] * fill]
        completions = self._sampler.complete(
            leaves, rows, sampling, prompt_length=requests.prompt_length, limits=limits
        )
        return completions[:count]

    def close(self) -> None:
        """Does nothing."""
