"""What a user reads after a mistake in a strategy, and before a plan is whole: the whole text."""

from __future__ import annotations

import pytest
from expected import Expected
from traced_dags import chain, op, traced

import piper_jax as piper
from piper_jax import Strategy, directive, where
from piper_jax.ir.nodes import DeviceGroup
from piper_jax.planning import StrategyOptions

expected = Expected(__file__)


# -- strategies ----------
@expected(
    piper.DirectiveError,
    """
    directive('Quux77') at FILE.py:LINE: there is no strategy 'Quux77'.
    help: known: ...
""",
)
def unknown_strategy():
    chain(2).apply(Strategy(directives=(directive("Quux77"),)))


@expected(
    piper.DirectiveError,
    """
    directive('1F1B', sheduel='flat') at FILE.py:LINE: option 'sheduel' means nothing to 1F1B.
        memory_optimization: ...
    help: known: ...
""",
)
def option_that_means_nothing():
    chain(2).apply(Strategy(directives=(directive("1F1B", sheduel="flat"),)))


@expected(
    piper.DirectiveError,
    """
    directive('ZeRO-3', gather_distanse=2) at FILE.py:LINE: option 'gather_distanse' means nothing to ZeRO-3.
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
    two schedules: directive('GPipe') at FILE.py:LINE and directive('1F1B') at FILE.py:LINE.
    help: a schedule orders everything; name one.
""",
)
def two_schedules():
    chain(2).apply(Strategy(directives=(directive("GPipe"), directive("1F1B"))))


@expected(
    piper.DirectiveError,
    """
    zero_stage=1 at FILE.py:LINE contradicts directive('ZeRO-3') at FILE.py:LINE.
    help: name one ZeRO stage.
""",
)
def two_zero_stages():
    chain(2).apply(Strategy(zero_stage=1, directives=(directive("ZeRO-3"),)))


@expected(
    piper.DirectiveError,
    """
    directive('ZeRO-2') at FILE.py:LINE contradicts directive('ZeRO-3') at FILE.py:LINE.
    help: name one ZeRO stage.
""",
)
def two_zero_directives():
    chain(2).apply(Strategy(data_parallel=2, directives=(directive("ZeRO-2"), directive("ZeRO-3"))))


@expected(
    piper.DirectiveError,
    """
    directive('ZeRO-0') at FILE.py:LINE: there is no strategy 'ZeRO-0'.
    help: did you mean 'ZeRO-1', 'ZeRO-2' or 'ZeRO-3'?
""",
)
def zero_stage_that_does_not_exist():
    chain(2).apply(Strategy(directives=(directive("ZeRO-0"),)))


@expected(
    piper.DirectiveError,
    """
    directive('FSDP') at FILE.py:LINE: there is no strategy 'FSDP'.
    help: did you mean 'ZeRO-3'?
""",
)
def strategy_by_what_others_call_it():
    chain(2).apply(Strategy(directives=(directive("FSDP"),)))


@expected(
    piper.DirectiveError,
    """
    Strategy at FILE.py:LINE: cut[0]: the model has 2 units, too few for 4 stages.
    help: use pipeline_parallel=2 at most, or more regions.
""",
)
def what_follows_from_a_strategy_names_its_line():
    chain(2).apply(Strategy(pipeline_parallel=4))


@expected(
    piper.DirectiveError,
    """
directive('Interleaved1F1B', num_virtual_stages=3) at FILE.py:LINE: cut[0]: the model has 4 units, too few for 6 stages.
help: a rank has 3 stages: use pipeline_parallel=1 or num_virtual_stages=2 at most, or more regions.
""",
)
def too_many_virtual_stages():
    named = directive("Interleaved1F1B", num_virtual_stages=3)
    chain(4).apply(Strategy(pipeline_parallel=2, num_microbatches=2, directives=(named,)))


@expected(
    piper.DirectiveError,
    """
    order[3] at FILE.py:LINE: slot 1: F[PP=0] layers.0 is in slot 0 already.
    help: list each node once.
""",
)
def a_strategy_of_the_users_own_names_its_line():
    @piper.strategy("Repeats")
    def repeats(plan: piper.Plan, options: StrategyOptions) -> piper.Plan:
        plan = plan.cut(stages=2).place(where(PP=0), group=0).place(where(PP=1), group=1)
        return plan.order([where(PASS="F"), where(PP=0, PASS="F")])

    chain(2).apply(Strategy(pipeline_parallel=2, directives=(directive("Repeats"),)))


@expected(
    piper.DirectiveError,
    """
    directive('1F1BB') at FILE.py:LINE: there is no strategy '1F1BB'.
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


def forgetful() -> piper.Plan:
    plan = chain(2).split(where(), num_microbatches=2).place(where(PP=0), group=0).place(where(PP=1), group=1)
    return plan.order([where(MB=0, PASS="F"), where(MB=0, PASS="B"), where(MB=1, PASS="B")])


FORGOTTEN = """
    whole-orders: order[3] at FILE.py:LINE: the order of d0 leaves out F[PP=0,MB=1] layers.0.
        it names F[PP=0,MB=0] layers.0
    help: list this pass for every microbatch, or for none.
"""


@expected(piper.PlanError, FORGOTTEN)
def an_order_that_forgets_a_microbatch():
    forgetful().check()


@expected(piper.PlanError, FORGOTTEN)
def simulating_an_order_that_forgets_a_microbatch():
    piper.simulate(forgetful())


@expected(
    piper.PlanError,
    """
    backward-with-forward: place[2] at FILE.py:LINE: B[PP=1] layers.1 is on d2, but its forward is on d1.
    help: place both with one filter that does not name PASS.
""",
)
def a_backward_away_from_its_forward():
    plan = chain(2).place(where(PP=0), group=0).place(where(PP=1, PASS="F"), group=1)
    plan.place(where(PP=1, PASS="B"), group=2).check()


@pytest.mark.parametrize("name", expected.cases)
def test_message(name):
    expected.check(name)
