"""The first phase of a run: compiles the program, opens the tokenizer and the data; writes nothing."""

from __future__ import annotations

from pathlib import Path

import attrs

from nnxdsl.config.data import Data
from nnxdsl.config.experiment import Experiment
from nnxdsl.data.dataset import Dataset
from nnxdsl.data.loaders.build import load_of
from nnxdsl.data.loaders.token_cache import TOKENS, TokenCache
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.prompts import Prompts
from nnxdsl.data.sampler import BatchSampler
from nnxdsl.data.sequences import Sequences
from nnxdsl.data.split import train_test_split
from nnxdsl.data.tokenizers.base import TokenizerBase, open_tokenizer
from nnxdsl.errors import PlanError, Problem
from nnxdsl.planning.plan import warnings
from nnxdsl.program.compile import Program
from nnxdsl.program.compile import compile as compile_experiment
from nnxdsl.program.init import Source
from nnxdsl.program.memory import require_fit
from nnxdsl.program.teacher import teacher_of
from nnxdsl.rollouts.rollouts import Rollouts
from nnxdsl.runtime.distributed import is_single_process, process_0_first
from nnxdsl.sharding.mesh import own_device, usable_memory
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.batches import Batches, DatasetBatches, RolloutBatches
from nnxdsl.trainer.evaluation import Evaluator
from nnxdsl.weights import sources


@attrs.define
class Prepared:
    """What a run trains with.

    Attributes:
        program: The program.
        tokenizer: Of prompts and completions.
        sampler: Which rows, or which prompts, each step trains on.
        evaluator: Held-out metrics and samples; None where nothing is evaluated.
        source: The first weights; None before they are opened, and again once they are on the devices.
    """

    program: Program
    tokenizer: TokenizerBase
    sampler: BatchSampler | Rollouts
    evaluator: Evaluator | None
    source: Source | None = None

    @property
    def dataset(self) -> Dataset:
        """The training data."""
        return self.sampler.prompts if isinstance(self.sampler, Rollouts) else self.sampler.dataset

    def batches(self) -> Batches:
        """The batches of the training loop."""
        if isinstance(self.sampler, Rollouts):
            return RolloutBatches(self.program, self.sampler)
        return DatasetBatches(self.program, self.sampler)


def prepare(experiment: Experiment, home: Path, display: Display) -> Prepared:
    """Compiles an experiment and reads its data. Weights are not opened, and nothing is written.

    Args:
        experiment: The experiment.
        home: Directory of all runs.
        display: What people see.

    Raises:
        SpecError, PlanError, DataError, WeightsError: The experiment cannot be run.
    """
    display.stage(f"{experiment.name}: reading data")
    program = compile_experiment(experiment)
    require_fit(program.blueprint, usable_memory(own_device(program.mesh)))
    for warning in warnings(program.blueprint):
        display.say(f"warning: {warning.path}: {warning.message}")
    config = program.blueprint.config
    tokenizer = sources.open_tokenizer_of(experiment, home, config.vocab_size)
    _require_same_tokenizer(experiment, tokenizer, home)
    cache = TokenCache(home / TOKENS, display)
    if not is_single_process():  # the first process tokenizes, and the others map what it has stored
        cache = attrs.evolve(cache, min_bytes=0)

    def read(data: Data, path: str) -> Dataset:
        dataset = process_0_first(
            lambda: load_of(
                experiment,
                data,
                tokenizer,
                max_position=config.max_length,
                vocabulary=config.vocab_size,
                cache=cache,
            )
        )
        _require_cacheable(experiment, dataset, path)
        return dataset

    dataset = read(experiment.data, "data")
    split = None
    if experiment.test_size is not None:
        dataset, split = train_test_split(dataset, experiment.test_size)
    for line in dataset.report.lines():
        display.say(line)
    if experiment.epochs is not None:  # the rows are counted now
        steps = experiment.steps_for(len(dataset))
        display.say(f"epochs={experiment.epochs:g}: {steps:,} steps on {len(dataset):,} rows")
        program = program.with_steps(steps)
    rollouts = Rollouts.of(program, dataset, tokenizer, home) if isinstance(dataset, Prompts) else None
    evaluator, evaluation = None, experiment.evaluation
    if evaluation is not None:
        held_out = split if evaluation.data is None else read(evaluation.data, "evaluation.data")
        if rollouts is not None and isinstance(held_out, Prompts):
            rollouts.check_prompts(held_out)
        evaluator = Evaluator(program, evaluation, held_out, tokenizer, dataset.is_chat, rollouts)
    sampler = _sampler(program, dataset) if rollouts is None else rollouts
    return Prepared(program, tokenizer, sampler, evaluator)


def _sampler(program: Program, dataset: Dataset) -> BatchSampler:
    experiment = program.experiment
    return BatchSampler(
        dataset,
        batch_size=experiment.batch_size,
        seed=experiment.seed,
        order=experiment.data.order,
        batching=experiment.batching,
        blocks=program.blueprint.blocks,
    )


def _require_same_tokenizer(experiment: Experiment, tokenizer: TokenizerBase, home: Path) -> None:
    """Refuses a teacher with another tokenizer, whose distributions are over other token ids."""
    teacher = teacher_of(experiment)
    if teacher is None:
        return
    owner = sources.tokenizer_owner(teacher)
    teacher_tokenizer = open_tokenizer(owner.model.tokenizer, sources.tokenizer_directory(owner, home))
    if teacher_tokenizer.fingerprint != tokenizer.fingerprint:
        message = "has another tokenizer than the model: token ids differ between the two tokenizers"
        raise PlanError([Problem("objective.teacher", message)], f"Experiment '{experiment.name}'")


def _require_cacheable(experiment: Experiment, dataset: Dataset, path: str) -> None:
    """Refuses to precompute the reference or a teacher for rows of a kind that cannot hold the values."""
    kind = type(dataset).__qualname__
    objective = experiment.objective
    if objective.teacher_top_k and objective.teacher is not None and not isinstance(dataset, Sequences):
        message = f"{path} yields {kind}, for which a teacher's top-k cannot be precomputed; unset it"
        raise PlanError([Problem("objective.top_k", message)], f"Experiment '{experiment.name}'")
    if experiment.reference_mode == "cached" and not isinstance(dataset, Pairs):
        message = f"{path} yields {kind}, but reference log-probs can only be cached for preference pairs; use 'online'"
        raise PlanError([Problem("memory.reference", message)], f"Experiment '{experiment.name}'")
