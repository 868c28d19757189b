"""Stages on different numbers of devices: a device of a smaller group takes several slices of each microbatch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from carrying_model import Net, regression, rows
from oracle import Problem, assert_steps, momentum
from tiny_models import Tower, mean_loss, tokens, weighted_loss

import piper_jax as piper
from piper_jax import where


def compiled(problem: Problem, sizes: tuple[int, ...], microbatches: int, **zero: Any) -> piper.Train:
    """Stage ``s`` on ``sizes[s]`` devices of its own, one after another."""
    plan = piper.trace(problem.loss_fn, problem.params, problem.batch, optimizer=problem.optimizer)
    plan, first = plan.split(where(), num_microbatches=microbatches), 0
    for stage, size in enumerate(sizes):
        plan = plan.place(where(PP=stage), group=tuple(range(first, first + size)))
        first += size
    return piper.compile(plan.replicate(where(), axes=("data",), **zero))


@pytest.mark.parametrize(
    ("sizes", "zero"),
    [
        ((1, 4), {"shard_params": True}),
        pytest.param((4, 1), {}, marks=pytest.mark.full),
        pytest.param((2, 4, 1), {"shard_optimizer": True}, marks=pytest.mark.full),
    ],
)
def test_weighted_losses_and_shards(sizes: tuple[int, ...], zero: dict[str, bool]) -> None:
    problem = Problem(loss_fn=weighted_loss, params=Tower(layers=len(sizes)), batch=tokens())
    assert_steps(problem, compiled(problem, sizes, 2, **zero), problem.reference(2, max(sizes)))


@pytest.mark.parametrize(
    ("sizes", "zero"),
    [
        ((1, 2), {"shard_grads": True}),
        pytest.param((2, 1), {"shard_optimizer": True}, marks=pytest.mark.full),
        pytest.param((2, 4), {"shard_grads": True}, marks=pytest.mark.full),
        pytest.param((2, 1), {"shard_params": True}, marks=pytest.mark.full),
    ],
)
def test_shards_of_weights_that_are_tied_over_groups_of_different_size(
    sizes: tuple[int, ...], zero: dict[str, bool]
) -> None:
    problem = Problem(loss_fn=mean_loss, params=Tower(layers=2, tied=True), batch=tokens())
    assert_steps(problem, compiled(problem, sizes, 1, **zero), problem.reference(1, max(sizes)))


def test_tied_weights_dropout_and_every_question() -> None:
    problem = Problem(loss_fn=mean_loss, params=Tower(layers=2, tied=True, dropout=0.5), batch=tokens())
    train = compiled(problem, (1, 2), 3)
    assert_steps(problem, train, problem.reference(3, 2))
    state = train.init(problem.params)
    assert train.bisect(state, problem.batch) is None
    for node in ("F[PP=0,MB=1]", "B[PP=0,MB=2]", "B[PP=1,MB=0]"):
        assert train.run_node(node, state, problem.batch).difference < 2e-5
    predicted = train.predict(state, problem.batch, lambda model, batch: model.embed(batch["x"]))
    np.testing.assert_allclose(predicted, problem.params.embed(problem.batch["x"]), rtol=1e-6)


@pytest.mark.full
def test_carried_state() -> None:
    problem = Problem(loss_fn=regression, params=Net(), batch=rows(), optimizer=momentum(0.05))
    assert_steps(problem, compiled(problem, (1, 2, 1, 2), 2), problem.reference(2, 2))


def test_sizes_that_do_not_divide_are_refused() -> None:
    problem = Problem(loss_fn=mean_loss, params=Tower(layers=2), batch=tokens())
    with pytest.raises(piper.PlanError, match="do not divide a microbatch alike") as error:
        compiled(problem, (2, 3), 1)
    assert "d2-4: 3 replicas" in str(error.value)
