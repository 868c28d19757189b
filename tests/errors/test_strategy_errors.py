"""What a user reads after a mistake in a strategy, and before a plan is whole: the whole text."""

from __future__ import annotations

import pytest
from expected import Expected
from traced_dags import chain, op, traced

import piper_jax as piper
from piper_jax import Strategy, directive, where
from piper_jax.ir.nodes import DeviceGroup

expected = Expected(__file__)


# -- strategies ----------
@expected(
    piper.DirectiveError,
    """
    there is no strategy 'Nonesuch'.
    help: known: ...
""",
)
def unknown_strategy():
    chain(2).apply(Strategy(directives=(directive("Nonesuch"),)))


@expected(
    piper.DirectiveError,
    """
    directive('1F1B', sheduel='flat'): option 'sheduel' means nothing to 1F1B.
        memory_optimization: ...
    help: known: ...
""",
)
def option_that_means_nothing():
    chain(2).apply(Strategy(directives=(directive("1F1B", sheduel="flat"),)))


@expected(
    piper.DirectiveError,
    """
    directive('ZeRO-3', gather_distanse=2): option 'gather_distanse' means nothing to ZeRO-3.
        communication_overlap: ...
        bucket_bytes: ...
        reduce_every: ...
        gather_distance: ...
    help: did you mean 'gather_distance'?
""",
)
def mistyped_option():
    chain(2).apply(Strategy(data_parallel=2, directives=(directive("ZeRO-3", gather_distanse=2),)))


@expected(
    piper.DirectiveError,
    """
    two schedules: directive('GPipe') and directive('1F1B').
    help: a schedule orders everything; name one.
""",
)
def two_schedules():
    chain(2).apply(Strategy(directives=(directive("GPipe"), directive("1F1B"))))


@expected(
    piper.DirectiveError,
    """
    zero_stage=1 contradicts directive('ZeRO-3').
    help: name one ZeRO stage.
""",
)
def two_zero_stages():
    chain(2).apply(Strategy(zero_stage=1, directives=(directive("ZeRO-3"),)))


@expected(
    piper.DirectiveError,
    """
    cut[0] at one_f_one_b.py:LINE: the model has 2 units, too few for 4 stages.
    help: use 1 to 2 stages, or annotate more regions.
""",
)
def a_strategy_names_its_own_line():
    chain(2).apply(Strategy(pipeline_parallel=4))


@expected(
    piper.DirectiveError,
    """
    there is no strategy '1F1BB'.
    help: did you mean '1F1B'?
""",
)
def misspelt_strategy():
    chain(2).apply(Strategy(directives=(directive("1F1BB"),)))


@expected(
    piper.DirectiveError,
    """
    Strategy has no 'data_paralel'.
    help: did you mean 'data_parallel'?
""",
)
def misspelt_degree():
    Strategy(data_paralel=2)  # type: ignore[call-arg]


# -- completion ----------
@expected(
    piper.PlanError,
    """
    2 nodes have no group yet, the first is F[PP=1] layers.1.
    help: call plan.place(where(PP=1), group=...), or plan.apply(strategy).
""",
)
def completing_what_is_not_placed():
    chain(2).place(where(PP=0), group=0).complete()


@expected(
    piper.PlanError,
    """
    state embedding is used on groups of different shapes, and g1 does not hold whole copies.
        g0: data=1
        g1: tensor=2
    help: give these groups equal axes, or replicate the state over all axes of each.
""",
)
def tied_state_on_groups_that_cannot_join():
    ops = [op("a", 0, reads=("embedding",)), op("b", 1, reads=("embedding",))]
    plan = traced(ops, [("a", "b", "x")]).place(where(PP=0), group=DeviceGroup(name="g0", devices=(0,)))
    plan.place(where(PP=1), group=DeviceGroup(name="g1", devices=(1, 2), axes=(("tensor", 2),))).complete()


@pytest.mark.parametrize("name", expected.cases)
def test_message(name):
    expected.check(name)
