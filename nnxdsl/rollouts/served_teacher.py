"""Log-probabilities of sampled tokens from teachers behind servers: `nnxdsl serve`, or vLLM."""

from __future__ import annotations

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
    def of(cls, objective: Online, tokenizer: TokenizerBase) -> ServedTeachers:
        """Those of an objective whose student has this tokenizer."""
        paths = {name: f"objective.teacher_servers[{name!r}]" if name else PATH for name in objective.served_teachers}
        teachers = objective.served_teachers.items()
        return cls({name: ServedTeacher(settings, tokenizer, paths[name]) for name, settings in teachers})

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
            found = f"field '{COLUMN}': {row[COLUMN]!r} is none of objective.teacher_servers ({names})"
            found += nearest(str(row[COLUMN]), self.teachers)
        else:
            found = (
                f"field '{COLUMN}' is missing, which names one of objective.teacher_servers ({names}); this row has: "
            )
            found += f"{', '.join(row)}; rename another column with data.columns={{...: '{COLUMN}'}}"
        others = f" ({len(bad):,} of {len(row_ids):,} rows name no teacher)" if len(bad) > 1 else ""
        raise DataError(f"{row_ids[bad[0]]}: {found}{others}")

    def logps(
        self, names: Sequence[str], prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """The log-probability of each token of each completion under the teacher of that name; see `ServedTeacher`."""
        rows = {name: [index for index, other in enumerate(names) if other == name] for name in dict.fromkeys(names)}
        pool = ThreadPoolExecutor(len(rows), "teachers")  # their servers are asked at one time
        waiting = {
            name: pool.submit(self.teachers[name].logps, [prompts[i] for i in own], [completions[i] for i in own])
            for name, own in rows.items()
        }
        try:
            found = {
                index: logps
                for name, own in rows.items()
                for index, logps in zip(own, waiting[name].result(), strict=True)
            }
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return [found[index] for index in range(len(names))]


@attrs.define
class ServedTeacher:
    """Asks a server for log-probabilities.

    Attributes:
        settings: Where it is.
        tokenizer: Of the model that is trained.
        path: The path of these settings, which errors name.
    """

    settings: TeacherServer
    tokenizer: TokenizerBase
    path: str = PATH
    _client: Client = attrs.field(init=False)
    _model: str | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._client = Client(self.settings, self.path)

    def close(self) -> None:
        """Ends requests."""
        self._client.close()

    def logps(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-probability of each token of each completion, at temperature 1.

        Raises:
            RunError: The server does not answer, refuses, has another tokenizer, or answers without log-probabilities.
        """
        if self._model is None:
            self._model = self._checked_model()
        whole = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        answers = self._client.post_each("/v1/completions", [self._request(ids) for ids in whole])
        return [
            self._read(answer, len(ids), len(completion))
            for answer, ids, completion in zip(answers, whole, completions, strict=True)
        ]

    def _request(self, prompt: Sequence[int] | str) -> dict[str, Any]:
        """Asks for log-probabilities of a prompt, and for no completion."""
        fixed = {"max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 1.0, "return_token_ids": True}
        return {"model": self._model, "prompt": prompt, **fixed}

    def _read(self, answer: Any, length: int, count: int) -> list[float]:
        """Log-probabilities of the last `count` of so many tokens."""
        try:
            found = answer["choices"][0]["logprobs"]["token_logprobs"]
            logps = np.array(found[length - count : length], np.float32)
        except (KeyError, IndexError, TypeError, ValueError):
            logps = np.zeros(0, np.float32)
        if len(logps) != count or not np.isfinite(logps).all():
            raise self._client.error(
                "answers without a log-probability of each token of the prompt; expected nnxdsl serve or vLLM"
            )
        return logps.tolist()

    def _checked_model(self) -> str:
        """The model's name, if it has the tokenizer of the one that is trained."""
        names = self._client.models()
        name = self._model = self.settings.model or names[0]
        answer = self._client.post("/v1/completions", self._request(SAMPLE))
        self._model = None
        try:
            ids = [int(token) for token in answer["choices"][0]["prompt_token_ids"]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._client.error("answers without token ids; expected nnxdsl serve or vLLM") from error
        own, bos = self.tokenizer.encode(SAMPLE), self.tokenizer.bos_id
        theirs, ours = ([*tokens[1:]] if tokens[:1] == [bos] else tokens for tokens in (ids, own))
        if theirs != ours:
            place = next((i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), 0)
            raise self._client.error(
                f"has another tokenizer: it splits {SAMPLE!r} into {len(theirs)} tokens, and this run's into "
                f"{len(ours)}; from token {place} on {theirs[place : place + 4]} and {ours[place : place + 4]}"
            )
        return name
