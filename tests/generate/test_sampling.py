"""Who may be drawn, against numpy; how often they are; whose draws are whose."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl.generate.sampling import BLOCK, Sampling, draw, filter_logits, numbers_of, streams

ROWS = 20_000


def allowed(logits: np.ndarray, top_k: int | None, top_p: float | None) -> list[int]:
    """Ids that may be drawn from one row of logits, in order; those that equal the last one too; in float64."""
    order = np.argsort(-logits, kind="stable")

    def first(count: int) -> np.ndarray:
        return order[logits[order] >= logits[order[count - 1]]]

    order = first(top_k or len(logits))
    mass = np.exp(logits[order].astype(np.float64) - logits.max())
    mass /= mass.sum()
    if top_p is None:
        return sorted(order)
    needed = 1
    while mass[:needed].sum() < top_p:
        needed += 1
    return sorted(first(needed))


@pytest.mark.parametrize("top_k", [None, 1, 5, 30])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.4, 0.85, 0.999])
def test_who_may_be_drawn(top_k: int | None, top_p: float | None) -> None:
    logits = np.random.default_rng(0).normal(size=(8, 30)).astype(np.float32) * 2
    logits[:, 7] = logits[:, 21]  # equal ones
    logits[4:] -= 20  # all are negative
    actual = np.asarray(filter_logits(jnp.asarray(logits), top_k, None if top_p is None else jnp.float32(top_p)))
    for row in range(8):
        ids = np.flatnonzero(np.isfinite(actual[row])).tolist()
        assert ids == allowed(logits[row], top_k, top_p)
        np.testing.assert_array_equal(actual[row, ids], logits[row, ids])


def test_min_p_goes_by_the_likeliest_token() -> None:
    logits = jnp.log(jnp.array([0.5, 0.26, 0.14, 0.1]))
    for bound, count in ((0.1, 4), (0.21, 3), (0.5, 2), (0.6, 1)):
        assert int(jnp.isfinite(filter_logits(logits, None, None, jnp.float32(bound))).sum()) == count


def test_the_token_that_crosses_the_bound_is_of_the_set() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.0625, 0.0625]]))
    counts = {p: int(jnp.isfinite(filter_logits(logits, None, jnp.float32(p))).sum()) for p in (0.5, 0.51, 0.75, 0.76)}
    assert counts == {0.5: 1, 0.51: 2, 0.75: 2, 0.76: 3}


@pytest.mark.default_variants(2)
@pytest.mark.parametrize("size", [12, 2 * BLOCK + 12])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (4, None), (None, 0.6), (5, 0.7)])
def test_draws_follow_the_softmax_of_who_may_be_drawn(top_k: int | None, top_p: float | None, size: int) -> None:
    temperature = 1.7
    logits = np.full(size, -np.inf, np.float32)  # of a large vocabulary every so manyth token has a probability
    some = np.arange(0, size, size // 12)[:12]
    logits[some] = np.random.default_rng(1).normal(size=12).astype(np.float32) * 2
    keys = jax.random.split(jax.random.key(2), ROWS)
    rows = jnp.broadcast_to(logits, (ROWS, size))
    mass = None if top_p is None else jnp.float32(top_p)
    rendered = jax.jit(partial(draw, top_k=top_k, top_p=mass))(keys, rows, jnp.float32(temperature)).ids
    counted = np.bincount(np.asarray(rendered), minlength=size) / ROWS
    wanted = np.zeros(size)
    may = allowed(logits / np.float32(temperature), top_k, top_p)
    wanted[may] = np.exp(logits[may] / temperature)
    wanted /= wanted.sum()
    assert set(np.flatnonzero(counted)) <= set(may)
    # five standard deviations of a count
    np.testing.assert_array_less(np.abs(counted - wanted), 5 * np.sqrt(wanted * (1 - wanted) / ROWS) + 1e-9)


def test_draws_go_by_the_prompt_and_not_by_its_place() -> None:
    one = streams(jax.random.key(0), jnp.asarray(numbers_of([[1, 2], [3], [1, 2]])))
    other = streams(jax.random.key(0), jnp.asarray(numbers_of([[3], [5, 6, 7], [1, 2]])))
    actual, again = (jax.random.key_data(keys).tolist() for keys in (one, other))
    assert actual[1] == again[0]
    assert actual[0] == again[2]
    assert len({tuple(key) for key in (*actual, *again)}) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"temperature": -1.0}, "temperature: expected at least 0, got -1.0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k: expected at least 1, got 0"),
        ({"temperature": 1.0, "top_p": 1.0}, "top_p: expected a value between 0 and 1, got 1.0"),
        ({"top_p": 0.5}, "top_k, top_p and min_p have no effect with temperature 0"),
    ],
)
def test_settings_that_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        Sampling(**{"max_new_tokens": 3, **values})
