"""State that the loss function changes: carried over microbatches and steps as on one device, or refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from carrying_model import DIM, LAYERS, ROWS, Net, regression, rows
from flax import linen as nn
from oracle import Problem, assert_equivalent, momentum, strategy

import piper_jax as piper


@pytest.fixture(scope="module")
def net() -> Problem:
    return Problem(loss_fn=regression, params=Net(), batch=rows(), optimizer=momentum(0.05))


@pytest.fixture(scope="module")
def once_a_step() -> Problem:
    return Problem(loss_fn=regression, params=Net(in_turn=False), batch=rows(), optimizer=momentum(0.05))


@pytest.mark.parametrize(("schedule", "stages", "data", "zero"), [("1F1B", 4, 2, 1), ("ZBH1", 2, 2, 3)])
def test_state_carried_over_microbatches(net: Problem, schedule: str, stages: int, data: int, zero: int) -> None:
    train = assert_equivalent(
        net, strategy(stages=stages, data=data, microbatches=3, schedule=schedule, zero_stage=zero)
    )
    moved = [leaf.path for leaf in train.plan.source.state.leaves if leaf.kind == "mutable"]
    assert len(moved) == LAYERS * 7


@pytest.mark.parametrize(("schedule", "stages", "data"), [("DualPipe", 2, 2), ("DualPipeV", 2, 1)])
def test_state_reduced_once_a_step_under_two_way_schedules(
    once_a_step: Problem, schedule: str, stages: int, data: int
) -> None:
    train = assert_equivalent(once_a_step, strategy(stages=stages, data=data, microbatches=4, schedule=schedule))
    counts = [train.params(state).layers[0].load[...].sum() for state in _states(once_a_step, train)]
    assert all(0 < count <= ROWS * DIM for count in counts)


def _states(problem: Problem, train: piper.Train) -> Any:
    state = train.init(problem.params)
    for step in range(2):
        state, _ = train.step(state, problem.batch_of(step))
        yield state


def test_a_two_way_schedule_cannot_carry_over_microbatches(net: Problem) -> None:
    with pytest.raises(piper.PlanError, match=r"carried-in-order: layers\.0.* each run a part") as error:
        net.parallelize(strategy(stages=2, microbatches=4, schedule="DualPipe"))
    assert 'carry="mean"' in str(error.value)


class Block(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> tuple[Any, None]:
        with piper.annotate("PP"):
            y = nn.Dense(DIM, use_bias=False)(x)
            return x + jnp.tanh(nn.BatchNorm(use_running_average=not self.train, momentum=0.8)(y)), None


class Linen(nn.Module):
    """Its layers one by one, or stacked under ``nn.scan``, where each is computed again in the backward pass."""

    scanned: bool
    train: bool = True

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if self.scanned:
            axes, streams = {"params": 0, "batch_stats": 0}, {"params": True}
            stack = nn.scan(nn.remat(Block), variable_axes=axes, split_rngs=streams, length=LAYERS)
            x, _ = stack(self.train, name="layers")(x, None)
        else:
            for index in range(LAYERS):
                x, _ = Block(self.train, name=f"layers_{index}")(x)
        return nn.Dense(2)(x)


@pytest.mark.parametrize("scanned", [pytest.param(False, marks=pytest.mark.full), True])
def test_linen_collections(scanned: bool) -> None:
    model, evaluated = Linen(scanned), Linen(scanned, train=False)
    variables = model.init(jax.random.key(0), jnp.ones((4, DIM)))

    def loss(variables: Any, batch: Any) -> Any:
        y, updated = model.apply(variables, batch["x"], mutable=["batch_stats"])
        return ((y - batch["y"]) ** 2).mean(), {"size": jnp.abs(y).mean(), "state": piper.Carried(updated)}

    def on_running_averages(variables: Any, batch: Any) -> Any:
        return ((evaluated.apply(variables, batch["x"]) - batch["y"]) ** 2).mean()

    problem = Problem(loss_fn=loss, params=variables, batch=rows(), optimizer=momentum(0.05))
    train = assert_equivalent(problem, strategy(stages=2, data=2, microbatches=2))
    state, metrics = train.step(train.init(variables), problem.batch)
    assert set(metrics) == {"loss", "size"}
    after = train.params(state)
    found = train.evaluate(state, problem.batch, on_running_averages)["loss"]
    np.testing.assert_allclose(found, on_running_averages(after, problem.batch), rtol=1e-5)
    before = {**after, "batch_stats": variables["batch_stats"]}
    assert not np.allclose(found, on_running_averages(before, problem.batch))


def counting(variables: Any, batch: Any) -> Any:
    """State that no batch changes, read by every layer; and an average of an average, which replicas have apart."""
    state, x = variables["state"], batch["x"]
    key, dropped = jax.random.split(jax.random.wrap_key_data(state["key"]))
    for index, kernel in enumerate(variables["kernels"]):
        kept = jax.random.bernoulli(jax.random.fold_in(dropped, index), 0.8, x.shape)
        x = x + kept * jnp.tanh(x @ kernel) * jnp.minimum(state["count"] / 8, 1)
    after = {
        "key": jax.random.key_data(key),
        "count": state["count"] + 1,
        "fast": 0.5 * state["fast"] + x.mean(0),
        "slow": 0.5 * state["slow"] + state["fast"],
    }
    return ((x[:, :2] - batch["y"]) ** 2).mean(), {"state": piper.Carried({"state": after})}


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("Interleaved1F1B", marks=pytest.mark.full)])
def test_each_stage_carries_on_what_no_batch_changes(schedule: str) -> None:
    kernels = [jax.random.normal(jax.random.key(index), (DIM, DIM)) / 2 for index in range(LAYERS)]
    start = {"key": jax.random.key_data(jax.random.key(3)), "count": jnp.int32(1)}
    state = {**start, "fast": jnp.zeros(DIM), "slow": jnp.zeros(DIM)}
    problem = Problem(
        loss_fn=counting, params={"kernels": kernels, "state": state}, batch=rows(), optimizer=momentum(0.05)
    )
    train = assert_equivalent(problem, strategy(stages=2, data=2, microbatches=2, schedule=schedule))
    carries = {leaf.path.rpartition(".")[2]: leaf.carry for leaf in train.plan.source.state.leaves if leaf.carry}
    assert carries == {"key": "equal", "count": "equal", "fast": "sequential", "slow": "sequential"}


def test_evaluation_and_gradients_leave_the_state_as_it_is(net: Problem) -> None:
    train = net.parallelize(strategy(stages=1, microbatches=2))
    state = train.init(net.params)
    before = np.array(train.params(state).layers[0].norm.mean[...])
    train.evaluate(state, net.batch)
    train.gradients(state, net.batch)
    np.testing.assert_array_equal(train.params(state).layers[0].norm.mean[...], before)
    assert train.bisect(state, net.batch) is None
    run = train.run_node("F[PP=0,MB=1]", state, net.batch)
    assert run.difference < 2e-5
