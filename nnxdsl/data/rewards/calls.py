"""Calls of reward functions: one after another in a thread, or together in an event loop, each within its time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
import math
import numbers
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np

from nnxdsl.data.rewards.functions import COMPLETION, BoundReward
from nnxdsl.data.user_code import submit
from nnxdsl.errors import RunError

T = TypeVar("T")

SHOWN = 80
"""Characters of a completion in messages."""
SLACK = 1.0
"""Seconds beyond the time of a call after which an event loop that ends none counts as blocked."""


@attrs.frozen
class Sampled:
    """Completions to be scored; each attribute has one entry per completion.

    Attributes:
        texts: Text, without the token that ends it.
        ids: Token ids, end token included.
        rows: Columns of the prompt's row.
        row_ids: What messages call that row.
        turns: The messages of the episode; empty where there is no environment.
    """

    texts: Sequence[str]
    ids: Sequence[Sequence[int]]
    rows: Sequence[Mapping[str, Any]]
    row_ids: Sequence[str]
    turns: Sequence[Sequence[Mapping[str, Any]]] = ()


@attrs.define
class Logged:
    """What one call of a function has reported.

    Attributes:
        count: Completions of the call.
        metrics: Names and values, in their order.
        extra: Values of its completions, by column.
    """

    count: int
    metrics: list[tuple[str, float]] = attrs.field(factory=list)
    extra: dict[str, list[Any]] = attrs.field(factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Reports a number; the metric is the mean of all of a step.

        Raises:
            ValueError: It is not a finite number.
        """
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError(f"log_metric({name!r}, {value!r}): expected a finite number")
        self.metrics.append((name, float(value)))

    def log_extra(self, column: str, values: Any) -> None:
        """Records a value of each completion: in a list, or alone in a function of one completion.

        Raises:
            ValueError: There are more or fewer values than completions, or one is not text, a number, a bool or None.
        """
        each = list(values) if isinstance(values, list | tuple | np.ndarray) else [values]
        if len(each) != self.count:
            raise ValueError(f"log_extra({column!r}, ...): {len(each)} values for {self.count} completions")
        self.extra[column] = [_plain(column, value) for value in each]


def _plain(column: str, value: Any) -> str | bool | int | float | None:
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise ValueError(f"log_extra({column!r}, ...): expected text, a finite number, a bool or None, got {value!r}")


Outcome = tuple[list[float], list[Logged]]
"""The values of a function, NaN where it does not apply, and what its calls have reported, in order of completions."""


def run_all(rewards: Sequence[BoundReward], sampled: Sampled) -> list[Outcome]:
    """Calls all functions; those that are `async` run while the others are called one after another.

    Raises:
        RunError: A function raised, took too long, or did not return finite numbers; names it and the row.
    """
    clocks = [_Clock() for _ in rewards]
    waiting = {
        index: asyncio.run_coroutine_threadsafe(_awaited(reward, sampled, clocks[index]), _loop())
        for index, reward in enumerate(rewards)
        if reward.is_async
    }
    try:
        results = {
            index: _in_thread(functools.partial(_called, reward, sampled, clock), reward, sampled, clock)
            for index, (reward, clock) in enumerate(zip(rewards, clocks, strict=True))
            if not reward.is_async
        }
        for index, future in waiting.items():
            results[index] = _collected(future, rewards[index], sampled, clocks[index])
        return [results[index] for index in range(len(rewards))]
    finally:
        for future in waiting.values():
            future.cancel()


@attrs.define
class _Clock:
    """When a call of a function last began or ended, and which completion it was for."""

    index: int = 0
    since: float = attrs.field(factory=time.monotonic)

    def tick(self, index: int) -> None:
        self.index, self.since = index, time.monotonic()


def _called(reward: BoundReward, sampled: Sampled, clock: _Clock) -> Outcome:
    """Calls a function that is not `async`."""
    values: list[float] = []
    logs: list[Logged] = []
    for chosen in _calls(reward, sampled):
        clock.tick(chosen.start)
        call, log = _prepared(reward, sampled, chosen)
        values += _values(_guarded(call, reward, sampled, chosen), reward, sampled, chosen)
        logs.append(log)
    return values, logs


async def _awaited(reward: BoundReward, sampled: Sampled, clock: _Clock) -> Outcome:
    """Calls an `async` function, for `max_concurrency` completions at a time."""
    free = asyncio.Semaphore(reward.max_concurrency)

    async def one(chosen: slice) -> tuple[list[float], Logged]:
        call, log = _prepared(reward, sampled, chosen)
        async with free:
            clock.tick(chosen.start)
            result = await _within(reward.timeout, call, reward, sampled, chosen)
            clock.tick(chosen.start)
        return _values(result, reward, sampled, chosen), log

    tasks = [asyncio.ensure_future(one(chosen)) for chosen in _calls(reward, sampled)]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return [value for values, _ in results for value in values], [log for _, log in results]


async def _within(
    limit: float | None, call: Callable[[], Awaitable[Any]], reward: BoundReward, sampled: Sampled, chosen: slice
) -> Any:
    waited = asyncio.timeout(limit)
    try:
        async with waited:
            return await call()
    except (Exception, SystemExit) as error:  # the latter would end the loop of all functions
        if isinstance(error, TimeoutError) and waited.expired():
            raise _late(reward, sampled, chosen.start) from None
        raise _failed(error, reward, sampled, chosen) from error


def _guarded(call: Callable[[], T], reward: BoundReward, sampled: Sampled, chosen: slice) -> T:
    try:
        return call()
    except Exception as error:
        raise _failed(error, reward, sampled, chosen) from error


def _calls(reward: BoundReward, sampled: Sampled) -> list[slice]:
    """The completions of each call."""
    count = len(sampled.texts)
    return [slice(0, count)] if reward.is_batch else [slice(index, index + 1) for index in range(count)]


def _prepared(reward: BoundReward, sampled: Sampled, chosen: slice) -> tuple[Callable[[], Any], Logged]:
    """A call for some completions, and where it will report."""
    log = Logged(len(sampled.texts[chosen]))
    prepare = _given_to_all if reward.is_batch else _given_to_one
    arguments, named = prepare(reward, sampled, chosen)
    logs = {"log_metric": log.log_metric, "log_extra": log.log_extra}
    named |= {name: report for name, report in logs.items() if name in reward.arguments}
    return functools.partial(reward.function, *arguments, **named), log


def _given_to_one(reward: BoundReward, sampled: Sampled, chosen: slice) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a function of one completion, without and with a name."""
    index = chosen.start
    named = reward.columns(sampled.rows[index])
    if "completion_ids" in reward.arguments:
        named["completion_ids"] = list(sampled.ids[index])
    if reward.parameter != COMPLETION:
        return [sampled.texts[index]], named
    return [], {**named, COMPLETION: sampled.texts[index]}


def _given_to_all(reward: BoundReward, sampled: Sampled, chosen: slice) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a function of all completions, each a list; a column that a row lacks is None there."""
    rows = [reward.columns(row) for row in sampled.rows[chosen]]
    named: dict[str, Any] = {name: [row.get(name) for row in rows] for name in dict.fromkeys(itertools.chain(*rows))}
    if "prompts" in reward.arguments:
        named["prompts"] = [row["prompt"] for row in sampled.rows[chosen]]
    if "completions" in reward.arguments:
        named["completions"] = _as_prompts(sampled, chosen)
    if "completion_ids" in reward.arguments:
        named["completion_ids"] = [list(ids) for ids in sampled.ids[chosen]]
    return [], named


def _as_prompts(sampled: Sampled, chosen: slice) -> list[Any]:
    """Completions in the form of their prompts, as TRL gives them: text, or a list of messages."""
    texts = sampled.texts[chosen]
    messages = sampled.turns[chosen] or [[{"role": "assistant", "content": text}] for text in texts]
    return [
        text if isinstance(row.get("prompt"), str) else each
        for text, each, row in zip(texts, messages, sampled.rows[chosen], strict=True)
    ]


def _values(result: Any, reward: BoundReward, sampled: Sampled, chosen: slice) -> list[float]:
    """What a call returned as numbers.

    Raises:
        RunError: It is none, or not one for each completion.
    """
    if not reward.is_batch:
        return [_value(result, reward, sampled, chosen.start)]
    if isinstance(result, np.ndarray):
        result = result.tolist()
    count = len(sampled.texts[chosen])
    if not isinstance(result, list | tuple) or len(result) != count:
        what = f"{len(result)} values" if isinstance(result, list | tuple) else f"{result!r}"[:SHOWN]
        raise RunError(
            f"{_where(reward, sampled, chosen)} returned {what} for {count} completions, not a list of one each"
        )
    return [_value(value, reward, sampled, index) for index, value in enumerate(result)]


def _value(value: Any, reward: BoundReward, sampled: Sampled, index: int) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        where = _where(reward, sampled, slice(index, index + 1))
        hint = " (expected one number for one completion)" if isinstance(value, list | tuple) else ""
        raise RunError(f"{where} returned {value!r}, not a finite number{hint}; {_shown(sampled, index)}")
    return float(value)


def _where(reward: BoundReward, sampled: Sampled, chosen: slice) -> str:
    ids = list(dict.fromkeys(sampled.row_ids[chosen]))
    rows = ids[0] if len(ids) == 1 else f"{ids[0]} ... {ids[-1]}"
    return f"{rows}: reward '{reward.name}'"


def _shown(sampled: Sampled, index: int) -> str:
    text = sampled.texts[index]
    return f"the completion was {text if len(text) <= SHOWN else text[:SHOWN] + '...'!r}"


def _failed(error: BaseException, reward: BoundReward, sampled: Sampled, chosen: slice) -> RunError:
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    shown = "" if reward.is_batch else f"; {_shown(sampled, chosen.start)}"
    return RunError(f"{_where(reward, sampled, chosen)} failed with {what}{shown}")


def _late(reward: BoundReward, sampled: Sampled, index: int) -> RunError:
    chosen = slice(0, None) if reward.is_batch else slice(index, index + 1)
    shown = "" if reward.is_batch else f"; {_shown(sampled, index)}"
    where = _where(reward, sampled, chosen)
    return RunError(f"{where} has not returned within timeout={reward.timeout:g} s{shown}")


def _in_thread(work: Callable[[], T], reward: BoundReward, sampled: Sampled, clock: _Clock) -> T:
    """The result of calls in a thread of their own, which ends with the process if a call never returns."""
    if reward.timeout is None:
        return work()
    clock.tick(0)
    return _waited(submit(work, f"reward {reward.name}"), reward, sampled, clock, reward.timeout)


def _collected(future: concurrent.futures.Future[T], reward: BoundReward, sampled: Sampled, clock: _Clock) -> T:
    """The result of calls in the event loop, unless one of them blocks it."""
    limit = None if reward.timeout is None else reward.timeout + SLACK
    return _waited(future, reward, sampled, clock, limit)


def _waited(
    future: concurrent.futures.Future[T], reward: BoundReward, sampled: Sampled, clock: _Clock, limit: float | None
) -> T:
    """A result, as long as calls begin and end within the limit."""
    while True:
        left = None if limit is None else max(0.0, clock.since + limit - time.monotonic())
        if concurrent.futures.wait([future], left).done:
            return future.result()
        if limit is not None and time.monotonic() - clock.since >= limit:
            raise _late(reward, sampled, clock.index)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all `async` functions: one for the whole process, since clients of theirs belong to one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
    return loop
