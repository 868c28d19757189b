"""The whole batch, saved plans, bisection, profiles, gradients without an optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import Problem, adamw, assert_equivalent, assert_steps, momentum, strategy
from seeded_fault import spoil_backward
from tiny_models import VOCAB, Tower, cross_entropy, mean_loss, tokens
from tolerances import TOLERANCES, assert_close

import piper_jax as piper


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(loss_fn=mean_loss, params=Tower(), batch=tokens(), optimizer=momentum())


@pytest.fixture(scope="module")
def train(problem: Problem) -> piper.Train:
    return problem.parallelize(strategy(stages=4, data=2, microbatches=4))


# -- against the whole batch --------------------------------------------------------------------------------
def test_a_separable_loss_is_that_of_the_whole_batch(problem: Problem, train: piper.Train) -> None:
    loss, expected = nnx.value_and_grad(lambda m: mean_loss(m, problem.batch))(problem.params)
    state = train.init(problem.params)
    assert_close(train.gradients(state, problem.batch), expected, TOLERANCES["float32"], "gradient")
    np.testing.assert_allclose(train.evaluate(state, problem.batch)["loss"], loss, rtol=1e-5)


# -- saved plans --------------------------------------------------------------------------------------------
def test_a_saved_plan_runs_after_bind(problem: Problem, train: piper.Train, tmp_path: Path) -> None:
    train.plan.save(tmp_path / "plan.json")
    plan = piper.load_plan(tmp_path / "plan.json")
    bound = plan.bind(problem.loss_fn, problem.params, problem.batch, optimizer=problem.optimizer)
    assert_steps(problem, piper.compile(bound), problem.reference(4, 2))
    with pytest.raises(piper.PlanError, match="another program") as caught:
        plan.bind(problem.loss_fn, Tower(layers=3), problem.batch, optimizer=problem.optimizer)
    assert "operation" in caught.value.detail[0] or "parameter" in caught.value.detail[0]


# -- bisection ----------------------------------------------------------------------------------------------
def test_bisection_finds_nothing_in_a_healthy_plan(problem: Problem, train: piper.Train) -> None:
    assert train.bisect(train.init(problem.params), problem.batch) is None


def test_bisection_names_the_first_node_that_differs(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the last product in the backward of stage 1 takes one factor twice."""
    spoil_backward(monkeypatch, problem.params)
    train = problem.parallelize(strategy(stages=4, microbatches=2))
    found = train.bisect(train.init(problem.params), problem.batch)
    assert found is not None
    assert (found.node.PASS, found.node.PP, found.node.MB) == ("B", 1, 0)
    assert found.what.startswith("cotangent of")
    assert found.error > 1e-3
    assert "test_train.py" in str(found) or "tiny_models.py" in str(found)


# -- profiles -----------------------------------------------------------------------------------------------
def test_the_measured_peak_is_the_simulated_one(problem: Problem, train: piper.Train) -> None:
    state = train.init(problem.params)
    measured, simulated = train.profile(state, problem.batch), piper.simulate(train.plan)
    for group in simulated.groups:
        found = measured.group(group.name).memory.peak_bytes
        assert found == pytest.approx(group.memory.peak_bytes, rel=0.02), group.name
    assert measured.makespan > 0
    train.step(state, problem.batch)


# -- without updates ------------------------------------------------------------------------------------------
def test_gradients_alone_needs_no_optimizer() -> None:
    problem = Problem(loss_fn=mean_loss, params=Tower(layers=2), batch=tokens(8))
    train = piper.parallelize(mean_loss, problem.params, problem.batch, strategy=strategy(stages=2, microbatches=2))
    state = train.init(problem.params)
    assert_close(
        train.gradients(state, problem.batch), problem.reference(2, 1).gradients, problem.tolerance, "gradient"
    )
    with pytest.raises(piper.RuntimeFault, match="traced without an optimizer"):
        train.step(state, problem.batch)


# -- programs -------------------------------------------------------------------------------------------------
def test_eight_equal_layers_on_four_stages_are_few_programs() -> None:
    """Forward and backward of first, middle and last stage, and the rounds of their updates."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for kernel in params:
            with piper.annotate("PP"):
                x = x + jax.nn.silu(x @ kernel)
        return ((x - batch["y"]) ** 2).mean()

    params = list(0.3 * jax.random.normal(jax.random.key(0), (8, 6, 6)))
    x, y = jax.random.normal(jax.random.key(1), (2, 24, 6))
    layout = strategy(stages=4, data=2, microbatches=4)
    train = piper.parallelize(loss, params, {"x": x, "y": y}, optimizer=adamw(), strategy=layout)
    programs = {i.program.digest for i in train.instructions() if i.program is not None and i.role != "prologue"}
    assert len(programs) <= 8


# -- frozen stages --------------------------------------------------------------------------------------------
def test_frozen_first_stages_under_gpipe() -> None:
    """Adapters on the last layer alone: three stages have no backward at all."""

    def loss(params: Any, batch: Any) -> Any:
        x = params["table"][batch["x"]]
        for kernel in params["frozen"]:
            with piper.annotate("PP"):
                x = jax.lax.stop_gradient(jnp.tanh(x @ kernel))
        with piper.annotate("PP"):
            x = x @ params["head"]
        return cross_entropy(x, batch["y"]).mean()

    keys = jax.random.split(jax.random.key(0), 5)
    kernels = [jax.random.normal(k, (6, 6)) for k in keys[:3]]
    params = {
        "table": jax.random.normal(keys[3], (VOCAB, 6)),
        "frozen": kernels,
        "head": jax.random.normal(keys[4], (6, VOCAB)),
    }
    problem = Problem(loss_fn=loss, params=params, batch=tokens(), optimizer=momentum())
    assert_equivalent(problem, strategy(stages=4, data=2, microbatches=2, schedule="GPipe"))
