"""The load-balancing loss of routers: added to what is minimised, not to what is evaluated, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl import Experiment, Mesh, Model, Objective, Weights, compile
from nnxdsl.data.batch import PairBatch
from nnxdsl.errors import PlanError, SpecError
from nnxdsl.models.families.llama3 import LLAMA3
from nnxdsl.models.families.registry import to_hf
from nnxdsl.models.moe.router import load_balance
from nnxdsl.program.batches.pairs import pair_positions
from nnxdsl.program.blueprint import build_blueprint

STRENGTH = 0.5


@pytest.mark.slow
def test_it_is_added_to_the_loss_with_its_gradient(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch]
) -> None:
    batch = pairs(3)
    with_loss, without = (
        compile(
            experiment(
                model=Model.Mixtral("tiny", router_aux_loss_coef=strength), batch_size=3, objective=Objective.CPO()
            )
        )
        for strength in (STRENGTH, 0.0)
    )
    state = without.init()
    (actual, terms), (plain, plain_terms) = (
        jax.jit(program.policy_loss.grads)(state.trainable, state.frozen, state.reference, program.shard_batch(batch))
        for program in (with_loss, without)
    )
    tokens = jnp.concatenate([batch.prompt, batch.chosen, batch.rejected], axis=1)

    @jax.jit
    @jax.value_and_grad
    def balance(leaves: dict[str, jax.Array]) -> Any:
        decoder: Any = without.policy_loss.policy.merge(leaves)
        total, count = load_balance(decoder(tokens, pair_positions(batch), dtype=jnp.float32).router_stats)
        return total / count

    value, toward = balance(state.trainable)
    aux = terms.metrics["aux_loss"]
    np.testing.assert_allclose(aux.total / aux.count, value, rtol=1e-6)
    assert "aux_loss" not in plain_terms.metrics
    # Sums over 3 pairs, which are divided by 3: the loss of the batch is there once.
    np.testing.assert_allclose(terms.loss.total - plain_terms.loss.total, 3 * STRENGTH * value, rtol=1e-5)
    routers = [path for path in actual if path.endswith("router.weight")]
    assert routers
    for path in actual:
        np.testing.assert_allclose(
            actual[path], plain[path] + 3 * STRENGTH * toward[path], rtol=1e-5, atol=1e-6 * np.abs(actual[path]).max()
        )
    assert max(float(jnp.abs(toward[path]).max()) for path in routers) > 0
    assert set(with_loss.evaluate(state, batch)) == set(without.evaluate(state, batch))


def test_what_cannot_have_it_says_so(experiment: Callable[..., Experiment], tmp_path: Path) -> None:
    model = Model.Mixtral("tiny", router_aux_loss_coef=0.01)
    with pytest.raises(SpecError, match=r"model.router_aux_loss_coef: router statistics"):
        experiment(model=model, mesh=Mesh(stage=2))
    with pytest.raises(SpecError, match=r"router_aux_loss_coef: expected a value >= 0, got -1.0"):
        Model.Mixtral("tiny", router_aux_loss_coef=-1.0)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(LLAMA3["tiny"], "float32")))
    dense = experiment(model=Model.HF(str(tmp_path), weights=Weights.Random(), router_aux_loss_coef=0.01))
    with pytest.raises(PlanError, match=r"model.router_aux_loss_coef: has no effect: the model has no experts"):
        build_blueprint(dense)
