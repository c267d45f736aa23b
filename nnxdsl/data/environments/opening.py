"""Environments at the beginning of an episode: a new object for a row, and the observation that `reset` returns."""

from __future__ import annotations

import concurrent.futures
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import attrs

from nnxdsl.config.objectives.base import Objective
from nnxdsl.config.objectives.environment import Environment
from nnxdsl.data.environments.registered import has_method, registered_environment
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.encode import Prompt
from nnxdsl.data.user_code import source_of, submit
from nnxdsl.errors import RunError

T = TypeVar("T")

OBSERVATION = "observation"
"""The column of what `reset` returned, which the end of the prompt is."""


class Opened(NamedTuple):
    """A new environment.

    Attributes:
        environment: The object.
        observation: What `reset` returned.
    """

    environment: Any
    observation: str | None


@attrs.frozen
class Opener:
    """Makes the environment of an episode.

    Attributes:
        spec: Names the class, and says how long a call may take.
        environment_class: The class.
    """

    spec: Environment
    environment_class: Any

    @classmethod
    def of_rows(cls, objective: Objective) -> Opener | None:
        """That of an objective whose environment adds an observation to each prompt; None for others.

        None also in a process that has not imported the class, as of `tools_of`.
        """
        registered = registered_environment(objective)
        opener = None if registered is None else cls(*registered)
        return opener if opener is not None and opener.has_observation else None

    @property
    def has_observation(self) -> bool:
        """Whether `reset` is annotated to return anything but None."""
        annotation = inspect.signature(self.environment_class.reset).return_annotation
        return annotation not in (inspect.Signature.empty, None, type(None), "None")

    def missing(self, row: Mapping[str, Any]) -> str | None:
        """Says which column `reset` has a parameter without a default for, and the row does not have; None for none."""
        names = (one.name for one in self._named if one.default is one.empty and one.name not in row)
        name = next(names, None)
        return name and f"environment '{self.spec.name}' reads '{name}', which the row does not have"

    def fingerprint(self) -> str:
        """The source of the class."""
        return source_of(self.environment_class)

    def open(self, row: Mapping[str, Any], where: str) -> Opened:
        """The environment of one episode of a row.

        Args:
            row: Its columns.
            where: Names the row and the class in messages.

        Raises:
            RunError: The class or `reset` raised, took longer than its time, or `reset` returned no text.
        """
        parameters = inspect.signature(self.environment_class.reset).parameters.values()
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        named = {one.name for one in self._named}
        columns = {name: value for name, value in row.items() if takes_all or name in named}

        def start() -> Opened:
            environment = self.environment_class()
            return Opened(environment, environment.reset(**columns))

        opened = self.call(start, where)
        if opened.observation is not None and not self.has_observation:
            raise RunError(
                f"{where} returned something from reset, which is not annotated; with `-> str` it is added to the "
                f"last message of the prompt"
            )
        if not isinstance(opened.observation, str | None):
            raise RunError(f"{where} returned {opened.observation!r:.80} from reset, which is no text")
        return opened

    def observation(self, row: Mapping[str, Any]) -> str:
        """What `reset` returns for a row; empty for None.

        Raises:
            RowError: See `open`; or the row has the column that it is stored in.
        """
        if OBSERVATION in row:
            raise RowError(
                "reserved column", f"the column '{OBSERVATION}' has the name of what reset returns; rename it"
            )
        if missing := self.missing(row):
            raise RowError("missing column", missing)
        where = f"environment '{self.spec.name}'"
        try:
            opened = self.open(row, where)
            self.close(opened.environment, where)
        except RunError as error:
            raise RowError("failed environment", str(error)) from error
        return opened.observation or ""

    def close(self, environment: Any, where: str) -> None:
        """Calls `close` of an environment whose episode is over, if its class has it.

        Raises:
            RunError: It raised, or took longer than its time.
        """
        if has_method(self.environment_class, "close"):
            self.call(environment.close, where)

    def call(self, function: Callable[[], T], where: str) -> T:
        """The result of a call, in a thread of its own that ends with the process if the call never returns.

        Raises:
            RunError: It raised, or took longer than its time.
        """
        future = submit(function, where)
        if not concurrent.futures.wait([future], self.spec.timeout).done:
            raise RunError(f"{where} has not returned within timeout={self.spec.timeout:g} s")
        error = future.exception()
        if isinstance(error, RunError):
            raise RunError(f"{where} {error}") from error
        if error is not None:
            message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise RunError(f"{where} failed with {message}") from error
        return future.result()

    @property
    def _named(self) -> list[inspect.Parameter]:
        parameters = list(inspect.signature(self.environment_class.reset).parameters.values())[1:]
        return [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]


def with_observation(prompt: Prompt, observation: str) -> Prompt:
    """A prompt with a text at its end, that of the last message of a chat, as in TRL.

    Raises:
        RowError: The last message of a chat is not a user's text.
    """
    return with_last_text(prompt, lambda text: text + observation, "the observation of reset")


def before_reset(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns of a row as they were before an observation was added."""
    observation = row.get(OBSERVATION, "")
    prompt = with_last_text(row["prompt"], lambda text: text.removesuffix(observation), "the observation of reset")
    return {**{name: value for name, value in row.items() if name != OBSERVATION}, "prompt": prompt}


def with_last_text(prompt: Prompt, change: Callable[[str], str], added: str) -> Prompt:
    """A prompt whose text, or that of the last message of a chat, is another.

    Args:
        prompt: Text or a chat.
        change: Makes the other text.
        added: What that adds, for messages.

    Raises:
        RowError: The last message of a chat is not a user's text.
    """
    if isinstance(prompt, str):
        return change(prompt)
    last = prompt[-1]
    if last["role"] != "user" or not isinstance(last["content"], str):
        message = f"{added} is added to the last message, which has to be text of a user"
        raise RowError("no user's text", f"field 'prompt', message {len(prompt)}: {message}")
    return [*prompt[:-1], {**last, "content": change(last["content"])}]
