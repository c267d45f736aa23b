"""Log-probabilities of sampled tokens from teachers behind servers: `nnxdsl serve`, or vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np

from nnxdsl.config.objectives.online import Online
from nnxdsl.config.objectives.teacher_server import TeacherServer
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.errors import DataError, nearest
from nnxdsl.rollouts.client import Client

PATH = "objective.teacher_server"
"""The path of the settings of a single teacher."""
COLUMN = "teacher_id"
"""The column with the name of a row's teacher, as of TRL."""
LEAST_TAIL = 1e-7
"""The least probability of all tokens beside the most likely ones, as of TRL: rounding leaves no smaller one."""
SAMPLE = "The answer, in short: 3.14 × 27 > 84; naïve café, 東京. {'x': [1, 2]}\n\tEnd"
"""A text that tokenizers split in different ways."""


@attrs.frozen
class ServedTeachers:
    """Asks the server of the teacher of each row.

    Attributes:
        teachers: By name; the name of a single one, which all rows have, is empty.
    """

    teachers: Mapping[str, ServedTeacher]

    @classmethod
    def of(cls, objective: Online, tokenizer: TokenizerBase, vocab_size: int) -> ServedTeachers:
        """Those of an objective whose student has this tokenizer, and a vocabulary of this size."""
        teachers = dict[str, ServedTeacher]()
        for name, settings in objective.served_teachers.items():
            path = f"objective.teacher_servers[{name!r}]" if name else PATH
            teachers[name] = ServedTeacher(settings, tokenizer, path, objective.teacher_top_k, vocab_size)
        return cls(teachers)

    def close(self) -> None:
        """Ends requests."""
        for teacher in self.teachers.values():
            teacher.close()

    def name(self, row: Mapping[str, Any]) -> str:
        """The name of a row's teacher."""
        return "" if "" in self.teachers else row[COLUMN]

    def check(self, columns: Sequence[Mapping[str, Any]], row_ids: Sequence[str]) -> None:
        """Refuses rows that name no teacher.

        Raises:
            DataError: Names the first of them.
        """
        if "" in self.teachers:
            return
        bad = [index for index, row in enumerate(columns) if row.get(COLUMN) not in [*self.teachers]]
        if not bad:
            return
        row, names = columns[bad[0]], ", ".join(map(repr, self.teachers))
        if COLUMN in row:
            message = f"field '{COLUMN}': {row[COLUMN]!r} is none of objective.teacher_servers ({names})"
            message += nearest(str(row[COLUMN]), self.teachers)
        else:
            message = (
                f"field '{COLUMN}' is missing, which names one of objective.teacher_servers ({names}); this row has: "
            )
            message += f"{', '.join(row)}; rename another column with data.columns={{...: '{COLUMN}'}}"
        others = f" ({len(bad):,} of {len(row_ids):,} rows name no teacher)" if len(bad) > 1 else ""
        raise DataError(f"{row_ids[bad[0]]}: {message}{others}")

    def scores(
        self, names: Sequence[str], prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
    ) -> list[Any]:
        """What the teacher of that name gives for each completion, see `ServedTeacher.scores`."""
        rows = {name: [index for index, other in enumerate(names) if other == name] for name in dict.fromkeys(names)}
        pool = ThreadPoolExecutor(len(rows), "teachers")  # their servers are asked at one time
        waiting = {
            name: pool.submit(
                self.teachers[name].scores, [prompts[i] for i in teacher_rows], [completions[i] for i in teacher_rows]
            )
            for name, teacher_rows in rows.items()
        }
        try:
            by_teacher = {
                index: one
                for name, teacher_rows in rows.items()
                for index, one in zip(teacher_rows, waiting[name].result(), strict=True)
            }
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return [by_teacher[index] for index in range(len(names))]


@attrs.define
class ServedTeacher:
    """Asks a server for log-probabilities.

    Attributes:
        settings: Where it is.
        tokenizer: Of the model that is trained.
        path: The path of these settings, which errors name.
        top_k: Number of its most likely tokens that are read; None for the sampled tokens alone.
        vocab_size: Tokens of the model that is trained; read with a `top_k`.
    """

    settings: TeacherServer
    tokenizer: TokenizerBase
    path: str = PATH
    top_k: int | None = None
    vocab_size: int = 0
    _client: Client = attrs.field(init=False)
    _model: str | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._client = Client(self.settings, self.path)

    def close(self) -> None:
        """Ends requests."""
        self._client.close()

    def scores(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[Any]:
        """What it gives for the tokens of each completion, at temperature 1.

        Returns:
            Of each completion the log-probability of each of its tokens `[n]`; with a `top_k` the most likely token ids
            where each of them is, `[n, k]`, and log-probabilities `[n, k + 1]`, the last of all other tokens.

        Raises:
            RunError: The server does not answer, refuses, has another tokenizer, or answers without log-probabilities;
                or an id is none of the student's vocabulary.
        """
        if self._model is None:
            self._model = self._checked_model()
        read, fields = self._read, {"logprobs": 0}
        if self.top_k is not None:
            read, fields = self._read_top, {"prompt_logprobs": self.top_k}
        whole = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        answers = self._client.post_each("/v1/completions", [self._request(ids, fields) for ids in whole])
        return [
            read(answer, len(ids), len(completion))
            for answer, ids, completion in zip(answers, whole, completions, strict=True)
        ]

    def _request(self, prompt: Sequence[int] | str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Asks for log-probabilities of a prompt, and for no completion."""
        fixed = {"max_tokens": 0, "echo": True, "temperature": 1.0, "return_token_ids": True}
        return {"model": self._model, "prompt": prompt, **fixed, **fields}

    def _read(self, answer: Any, length: int, count: int) -> list[float]:
        """Log-probabilities of the last `count` of so many tokens."""
        try:
            token_logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
            logps = np.array(token_logprobs[length - count : length], np.float32)
        except (KeyError, IndexError, TypeError, ValueError):
            logps = np.zeros(0, np.float32)
        if len(logps) != count or not np.isfinite(logps).all():
            raise self._client.error(
                "answers without a log-probability of each token of the prompt; expected nnxdsl serve or vLLM"
            )
        return logps.tolist()

    def _read_top(self, answer: Any, length: int, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The most likely tokens where the last `count` of so many tokens are, which the server may add to them."""
        k = self.top_k
        try:
            places = answer["choices"][0]["prompt_logprobs"][length - count : length]
            pairs = np.array([_most_likely(place, k) for place in places], np.float64)  # [n, k, 2]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            pairs = np.zeros(0)
        if pairs.shape != (count, k, 2):
            message = f"answers without prompt_logprobs={k} of each token of the prompt; expected nnxdsl serve or vLLM"
            raise self._client.error(message)
        ids, logps = pairs[..., 0].astype(np.int32), pairs[..., 1]
        if ids.max() >= self.vocab_size:
            raise self._client.error(
                f"has another vocabulary: token id {ids.max():,} is none of the {self.vocab_size:,} of this run's model"
            )
        others = np.log(np.maximum(1 - np.exp(logps).sum(axis=1, keepdims=True), LEAST_TAIL))
        return ids.tolist(), np.concatenate([logps, others], axis=1).tolist()

    def _checked_model(self) -> str:
        """The model's name, if it has the tokenizer of the one that is trained."""
        names = self._client.models()
        name = self._model = self.settings.model or names[0]
        answer = self._client.post("/v1/completions", self._request(SAMPLE, {}))
        self._model = None
        try:
            ids = [int(token) for token in answer["choices"][0]["prompt_token_ids"]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._client.error("answers without token ids; expected nnxdsl serve or vLLM") from error
        sample_ids, bos = self.tokenizer.encode(SAMPLE), self.tokenizer.bos_id
        theirs, ours = ([*tokens[1:]] if tokens[:1] == [bos] else tokens for tokens in (ids, sample_ids))
        if theirs != ours:
            place = next((i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), 0)
            raise self._client.error(
                f"has another tokenizer: it splits {SAMPLE!r} into {len(theirs)} tokens, and this run's into "
                f"{len(ours)}; from token {place} on {theirs[place : place + 4]} and {ours[place : place + 4]}"
            )
        return name


def _most_likely(place: Mapping[str, Any], count: int | None) -> list[tuple[int, float]]:
    """So many of the tokens of a place, the likeliest first, and their log-probabilities.

    Raises:
        ValueError: One is not finite.
    """
    pairs = [(int(token), float(one["logprob"])) for token, one in place.items()]
    if not all(math.isfinite(logp) for _, logp in pairs):
        raise ValueError("expected finite log-probabilities")
    return sorted(pairs, key=lambda one: (-one[1], one[0]))[:count]
