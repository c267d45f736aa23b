"""Samples episodes and scores them: the policy, an environment if there is one, and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from nnxdsl.config.objectives.online import Online
from nnxdsl.data.prompts import Prompts
from nnxdsl.data.rewards import Rewards, Sampled, Scores
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.encode import Encoder, stop_ids
from nnxdsl.errors import DataError
from nnxdsl.generate.sampler import Completion
from nnxdsl.models.slots import padded_turn, power_of_two
from nnxdsl.program.compile import Program
from nnxdsl.rollouts import engine
from nnxdsl.rollouts.environments import Environments
from nnxdsl.rollouts.episode import Episode
from nnxdsl.rollouts.served_teacher import ServedTeachers
from nnxdsl.rollouts.turns import Trajectory, Turn, Turns
from nnxdsl.runtime import distributed


@attrs.frozen
class EpisodeSampler:
    """Samples and scores with the policy of a program.

    Attributes:
        program: Of an experiment whose objective is `Online`.
        engine: Samples completions.
        turns: Plays episodes.
        rewards: The reward functions.
        teachers: Give log-probabilities of what was sampled; None where no server does.
    """

    program: Program
    engine: engine.Engine
    turns: Turns
    rewards: Rewards
    teachers: ServedTeachers | None = None

    @classmethod
    def of(cls, program: Program, tokenizer: TokenizerBase, rewards: Rewards, home: Path) -> EpisodeSampler:
        """That of a program.

        Raises:
            PlanError: Its environment is not known, or cannot be used.
            DataError: The chat template does not read what `experiment.data` gives it, or writes no tool calls.
        """
        objective, stops = program.experiment.objective, frozenset(stop_ids(tokenizer))
        assert isinstance(objective, Online)
        encoder, spec = Encoder.of(tokenizer, program.experiment.data), objective.environment
        turns = Turns(encoder, stops)
        if spec is not None:
            turns = Turns(encoder, stops, Environments(objective, encoder), spec.max_turns)
        vocab_size = program.blueprint.config.vocab_size
        teachers = ServedTeachers.of(objective, tokenizer, vocab_size) if objective.served_teachers else None
        return cls(program, engine.build(objective.engine, program, stops, home), turns, rewards, teachers)

    def close(self) -> None:
        """Ends requests to servers, and whatever samples."""
        self.engine.close()
        if self.teachers is not None:
            self.teachers.close()

    def check(self, prompts: Prompts) -> None:
        """Refuses rows that lack what is read of them, and episodes that do not fit into the model.

        Raises:
            DataError: A row lacks a column, names no teacher, or has a column whose name is taken; or there are too few
                positions.
        """
        if self.teachers is not None:
            self.teachers.check(prompts.columns, prompts.row_ids)
        environments = self.turns.environments
        if environments is None:
            self.rewards.check(prompts.columns, prompts.row_ids)
            return
        # A later turn is sampled behind those before it, with as much room as the first one.
        most, tokens = self.program.blueprint.config.max_length, prompts.max_completion_length
        if (needed := prompts.shapes["prompt"] + 2 * tokens) > most:
            raise DataError(
                f"with an environment, the longest prompt and twice data.max_completion_length must fit into the "
                f"model's {most:,} positions, and are {needed:,}; lower data.max_prompt_length or max_completion_length"
            )
        environments.check(prompts.columns, prompts.row_ids)
        self.rewards.check([_with_episode(row, Trajectory()) for row in prompts.columns], prompts.row_ids)

    def sample(
        self, weights: Any, prompts: Prompts, rows: Sequence[int], purpose: str, size: int
    ) -> tuple[list[Episode], Mapping[str, list[float]]]:
        """Scored episodes of rows, and what reward functions gave `log_metric`, by name.

        Args:
            weights: Whose policy answers, from `engine.weights`.
            prompts: The prompts.
            rows: One for each episode.
            purpose: Names the random numbers.
            size: Completions that are sampled in one batch, at least as many as rows: one compiled program for all.
        """

        def draw(turn: Turn) -> list[Completion]:
            count, length, name = size, prompts.shapes["prompt"], purpose
            if turn.number:  # lengths and numbers of prompts are other ones each time: powers of two are compiled once
                count, length = power_of_two(len(turn.prompts)), padded_turn(max(map(len, turn.prompts)))
                name = f"{purpose}, turn {turn.number}"
            requests = engine.Requests(
                turn.prompts,
                turn.limits,
                engine.seed_of(f"nnxdsl rollouts 1: seed {self.program.experiment.seed}, {name}"),
                batch_size=count,
                prompt_length=length,
                max_completion_length=prompts.max_completion_length,
            )
            return self.engine.sample(weights, requests)

        return self._scored(prompts, rows, self.turns.play(prompts, rows, draw))

    def _scored(
        self, prompts: Prompts, rows: Sequence[int], trajectories: Sequence[Trajectory]
    ) -> tuple[list[Episode], Mapping[str, list[float]]]:
        """Episodes with their rewards."""
        columns, environments = [prompts.columns[row] for row in rows], self.turns.environments
        has_tools = environments is not None and bool(environments.tools)
        turns = [one.turns for one in trajectories] if environments is not None else ()
        if turns:
            columns = [_with_episode(row, one) for row, one in zip(columns, trajectories, strict=True)]
        row_ids = [prompts.row_ids[row] for row in rows]
        sampled = Sampled(
            [one.text for one in trajectories], [one.ids for one in trajectories], columns, row_ids, turns
        )
        # A user's function may return other values in each process.
        scores = Scores(**distributed.on_process_0(lambda: self.rewards.score(sampled)._asdict()))
        teacher_ids = [None if self.teachers is None else self.teachers.name(prompts.columns[row]) for row in rows]
        scored = self._teacher_scores(prompts, rows, trajectories, teacher_ids)
        episodes = [
            Episode(
                row=row,
                ids=one.ids,
                is_sampled=one.is_sampled,
                logps=np.asarray(one.logps, np.float32),
                is_truncated=one.is_truncated,
                text=one.text,
                turns=one.turns if turns else (),
                calls=one.calls if has_tools else None,
                failures=one.failures,
                **scored[index],
                teacher_id=teacher_ids[index] or None,
                routed_experts=np.concatenate(one.routed_experts) if one.routed_experts else None,
                rewards=tuple(scores.values[index]),
                extra={name: values[index] for name, values in scores.extra.items()},
            )
            for index, (row, one) in enumerate(zip(rows, trajectories, strict=True))
        ]
        return episodes, scores.metrics

    def _teacher_scores(
        self, prompts: Prompts, rows: Sequence[int], trajectories: Sequence[Trajectory], names: Sequence[Any]
    ) -> Sequence[Mapping[str, Any]]:
        """The fields of each episode that its teacher, of that name, gives; empty without one."""
        if self.teachers is None:
            return [{}] * len(rows)
        found_rows = [prompts.row(row) for row in rows]
        ask, before = self.teachers.scores, [row.get("teacher_prompt", row["prompt"]).tolist() for row in found_rows]
        scores = distributed.on_process_0(lambda: ask(names, before, [one.ids for one in trajectories]))
        if self.program.experiment.objective.teacher_top_k is None:
            return [{"teacher_logps": np.asarray(logps, np.float32)} for logps in scores]
        return [{"teacher_top_k": (np.asarray(ids, np.int32), np.asarray(logps, np.float32))} for ids, logps in scores]


def _with_episode(row: Mapping[str, object], one: Trajectory) -> dict[str, object]:
    """The columns of a row with what an environment adds; see `environments.COLUMNS`."""
    return {**row, "environment_reward": one.reward, "turns": list(one.turns)}
