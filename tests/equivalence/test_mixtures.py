"""Mixtures of experts: both dispatches and both routings, the balance loss and an idle expert included.

Experts are whole on every replica here; ``test_experts`` divides them over devices.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Problem, assert_equivalent, strategy
from tolerances import TOLERANCES, assert_close

from piper_jax.models import moe

SIZES = {
    "num_layers": 2, "dim": 8, "num_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_experts": 4,
    "expert_dim": 8, "vocab_size": 11, "balance_weight": 0.1,
}  # fmt: skip
ROWS, LENGTH, IDLE = 16, 4, 1

SOFTMAX = {}
DROPLESS = {"dispatch": "dropless"}
SIGMOID = {
    "routing": "sigmoid", "num_shared_experts": 1, "capacity_factor": 2.0, "load_balancing": "dynamic",
    "bias_rate": 0.05,
}  # fmt: skip
TWO_WAY = {"num_layers": 4}
CELLS = [
    (SIGMOID | TWO_WAY, {"stages": 2, "data": 2, "microbatches": 4, "schedule": "DualPipeV", "zero_stage": 1}),
    (SOFTMAX, {"stages": 2, "data": 2, "microbatches": 2, "schedule": "1F1B", "zero_stage": 1}),
    (DROPLESS, {"stages": 2, "data": 2, "microbatches": 2, "schedule": "ZBH1", "zero_stage": 3}),
    (SIGMOID, {"stages": 2, "data": 2, "microbatches": 2, "schedule": "1F1B", "zero_stage": 3}),
    (SOFTMAX | TWO_WAY, {"stages": 2, "data": 2, "microbatches": 4, "schedule": "DualPipeV", "zero_stage": 3}),
    (DROPLESS | TWO_WAY, {"stages": 2, "data": 1, "microbatches": 4, "schedule": "DualPipeV"}),
    (SOFTMAX, {"stages": 2, "data": 2, "microbatches": 2, "schedule": "ZBH1", "zero_stage": 1}),
    (SIGMOID, {"stages": 2, "data": 2, "microbatches": 2, "schedule": "ZBH1", "zero_stage": 3}),
    (DROPLESS, {"stages": 1, "data": 4, "microbatches": 2, "schedule": "1F1B", "zero_stage": 1}),
]


def text(rows: int = ROWS) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (rows, LENGTH + 1), dtype=np.int32)
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}


@cache
def _problem(changes: tuple[tuple[str, Any], ...]) -> Problem:
    """Kernels are 8 times the usual, so that the router has its preferences; with sigmoids, one expert is idle."""
    model = moe.language_model(preset="tiny", **{**SIZES, **dict(changes)})
    module = jax.tree.map(lambda v: 8 * v if v.ndim > 1 else v, model.init(jax.random.key(0)))
    for layer in module.layers:
        if dict(changes).get("routing") == "sigmoid":
            layer.mlp.router.bias[...] = jnp.zeros(SIZES["num_experts"]).at[IDLE].set(-5.0)
    return Problem(loss_fn=model.loss_fn, params=module, batch=text())


def problem(changes: dict[str, Any]) -> Problem:
    return _problem(tuple(changes.items()))


def _name(value: Any) -> str:
    return "-".join(str(v) for v in value.values()) or "softmax"


@pytest.mark.full
@pytest.mark.parametrize(("changes", "layout"), CELLS, ids=_name)
def test_a_step_is_that_of_one_device(changes: dict[str, Any], layout: dict[str, Any]) -> None:
    tested = problem(changes)
    train = assert_equivalent(tested, strategy(**layout))
    _, metrics = train.step(train.init(tested.params), tested.batch)
    names = {"loss", "token_loss", "expert_load"}
    names |= set() if changes.get("load_balancing") == "dynamic" else {"balance_loss"}
    assert set(metrics) == (names if changes.get("dispatch") else {*names, "dropped_fraction"})
    assert len(metrics["expert_load"]) == changes.get("num_layers", SIZES["num_layers"])
    for load in metrics["expert_load"]:
        assert int(load.sum()) == ROWS * LENGTH * 2
        assert (int(load[IDLE]) == 0) == (changes.get("routing") == "sigmoid")
    balance = sum(float(value) for value in metrics.get("balance_loss", ()))
    assert float(metrics["token_loss"]) + 0.1 * balance == pytest.approx(float(metrics["loss"]), rel=1e-5)


def test_the_gradient_of_the_router_does_not_depend_on_the_layout() -> None:
    """The same two microbatches on one and on four replicas: a balance loss of each replica's own would differ."""
    tested, found = problem(DROPLESS | {"num_layers": 1}), []
    for data in (1, 4):
        train = tested.parallelize(strategy(data=data, microbatches=2))
        found.append(train.gradients(train.init(tested.params), tested.batch))
    assert_close(found[1], found[0], TOLERANCES["float32"], "gradient")
    assert float(jnp.abs(found[0]["layers"][0]["mlp"]["router"]["scores"]["kernel"][...]).max()) > 0
