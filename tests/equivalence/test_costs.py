"""Measured costs: each distinct program is timed as often as asked, each node has a cost, the state is left alone.

No time is asserted: where a number matters, every call takes a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from oracle import Problem, momentum, strategy
from tiny_models import Tower, mean_loss, tokens

import piper_jax as piper
from piper_jax.ir.nodes import Compute, Recv, Send, Update
from piper_jax.runtime import timing

ROUNDS = 2


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(loss_fn=mean_loss, params=Tower(layers=4, tied=True), batch=tokens())


@pytest.fixture(scope="module", params=[("1F1B",), ("DualPipeV",), ("1F1B", "ZeRO-3")], ids="+".join)
def train(problem: Problem, request: pytest.FixtureRequest) -> piper.Train:
    named = tuple(map(piper.directive, request.param))
    return problem.parallelize(
        piper.Strategy(pipeline_parallel=2, data_parallel=2, num_microbatches=4, directives=named)
    )


class Clock:
    """Stands for the measuring of time: every call takes one second, whatever runs beside it."""

    def __init__(self) -> None:
        self.alone: Counter[timing.Signature] = Counter()
        self.together: list[tuple[tuple[str, ...], ...]] = []

    def seconds(self, call: timing.Call) -> float:
        self.alone[call.signature] += 1
        return 1.0

    def seconds_together(self, calls: Sequence[timing.Call], turns: int) -> float:
        self.together.append(tuple(call.groups for call in calls))
        return float(len(calls) * turns)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(timing, "_seconds", found.seconds)
    monkeypatch.setattr(timing, "_seconds_together", found.seconds_together)
    return found


def test_each_distinct_program_and_transfer_is_timed_in_every_round(
    problem: Problem, train: piper.Train, clock: Clock
) -> None:
    train.measure_costs(train.init(problem.params), problem.batch, rounds=ROUNDS)
    programs = {i.program.digest for i in train.instructions() if i.program is not None}
    timed = {signature[1] for signature in clock.alone if signature[0] != "transfer" and len(signature) > 1}
    assert timed == programs
    assert set(clock.alone.values()) == {ROUNDS + 1}, "one round more, which is not counted"
    transfers = [i for i in train.instructions() if i.role == "transfer"]
    assert 1 <= sum(signature[0] == "transfer" for signature in clock.alone) < len(transfers)
    assert len(clock.together) == ROUNDS + 1
    assert {group for groups in clock.together[0] for group in groups} == {g for g in train.plan.groups if "+" not in g}


def test_every_node_has_a_cost_and_programs_share_theirs(problem: Problem, train: piper.Train, clock: Clock) -> None:
    costs = train.measure_costs(train.init(problem.params), problem.batch, rounds=1)
    nodes = train.plan.complete().nodes
    assert set(costs.seconds) == set(nodes)
    for node in nodes.values():
        if isinstance(node, Recv):
            assert costs.seconds[node.id] == 0.0
        elif isinstance(node, Compute | Send | Update):
            assert costs.seconds[node.id] > 0.0, str(node.id)
    for instruction in train.instructions():
        if instruction.nodes:
            assert sum(costs.seconds[n] for n in instruction.nodes) == pytest.approx(1.0), instruction.label
    assert costs.num_processors == pytest.approx(1.0), "together they take the sum of their times"
    report = piper.simulate(train.plan, costs=costs)
    passes = [i for i in train.instructions() if any(isinstance(nodes[n], Compute) for n in i.nodes)]
    assert report.makespan >= len(passes)
    assert report.costs == "measured, 1.00 groups at once"


def test_real_times_simulate_and_the_state_is_as_it_was(problem: Problem, train: piper.Train) -> None:
    state = train.init(problem.params)
    before = [np.array(v) for v in state.arrays if v.dtype == np.float32]
    costs = train.measure_costs(state, problem.batch, rounds=1)
    for array, expected in zip([v for v in state.arrays if v.dtype == np.float32], before, strict=True):
        np.testing.assert_array_equal(array, expected)
    assert piper.simulate(train.plan, costs=costs).makespan > 0.0
    assert costs.outside_seconds > 0.0
    train.step(state, problem.batch)


def test_what_cannot_be_measured_is_refused(problem: Problem, train: piper.Train) -> None:
    state = train.init(problem.params)
    with pytest.raises(piper.RuntimeFault, match="rounds=0"):
        train.measure_costs(state, problem.batch, rounds=0)
    train.step(state, problem.batch)
    with pytest.raises(piper.RuntimeFault, match="consumed by an earlier step"):
        train.measure_costs(state, problem.batch)
    small = Problem(loss_fn=mean_loss, params=Tower(layers=2), batch=tokens(8), optimizer=momentum())
    layout = strategy(stages=2, microbatches=2)
    alone = piper.parallelize(mean_loss, small.params, small.batch, strategy=layout)
    with pytest.raises(piper.RuntimeFault, match="measure_costs: the plan was traced without an optimizer"):
        alone.measure_costs(alone.init(small.params), small.batch)
