"""What a user reads after an order that cannot be: the whole text, with the cycle."""

from __future__ import annotations

import pytest
from expected import Expected
from traced_dags import chain, op, traced

import piper_jax as piper
from piper_jax import where


def split_chain():
    return chain(2).split(where(), num_microbatches=2)


def placed_chain():
    return split_chain().place(where(PP=0), group=0).place(where(PP=1), group=1)


expected = Expected(__file__)


@expected(
    piper.DirectiveError,
    """
    order[3] at FILE.py:LINE: B[PP=0,MB=0] layers.0 before F[PP=0,MB=0] layers.0 closes a cycle.
        F[PP=0,MB=0] layers.0
          -> data  B[PP=0,MB=0] layers.0
        > -> order F[PP=0,MB=0] layers.0  (this directive)
    help: list F[PP=0,MB=0] layers.0 first.
""",
)
def backward_before_forward():
    placed_chain().order([where(PP=0, MB=0, PASS="B"), where(PP=0, MB=0, PASS="F")])


@expected(
    piper.DirectiveError,
    """
    order[3] at FILE.py:LINE: one slot of B[PP=0,MB=0] layers.0 and F[PP=0,MB=0] layers.0 \
closes a cycle.
        F[PP=0,MB=0] layers.0
          -> data  F[PP=1,MB=0] layers.1
          -> data  B[PP=1,MB=0] layers.1
          -> data  B[PP=0,MB=0] layers.0
        > -> with  F[PP=0,MB=0] layers.0  (this directive)
    help: list them as separate slots.
""",
)
def a_slot_that_waits_for_itself():
    placed_chain().order([where(PP=0, MB=0)])


@expected(
    piper.DirectiveError,
    """
    order[3] at FILE.py:LINE: B[PP=0,MB=0] layers.0 before F[PP=0,MB=1] layers.0 closes a cycle.
        F[PP=0,MB=1] layers.0
          -> data  F[PP=1,MB=1] layers.1
          -> order F[PP=1,MB=0] layers.1
          -> data  B[PP=1,MB=0] layers.1
          -> data  B[PP=0,MB=0] layers.0
        > -> order F[PP=0,MB=1] layers.0  (this directive)
    help: list F[PP=0,MB=1] layers.0 first.
""",
)
def a_cycle_over_two_groups():
    placed_chain().order(
        [
            where(PP=1, MB=1, PASS="F"),
            where(PP=1, MB=0, PASS="F"),
            where(PP=0, MB=0, PASS="B"),
            where(PP=0, MB=1, PASS="F"),
        ]
    )


@expected(
    piper.DirectiveError,
    """
    order[3] at FILE.py:LINE: slot 1: F[PP=0,MB=0] layers.0 is in slot 0 already.
    help: list each node once.
""",
)
def a_node_listed_twice():
    placed_chain().order([where(PP=0, MB=0, PASS="F"), where(PP=0, PASS="F")])


@expected(
    piper.DirectiveError,
    """
    order[4] at FILE.py:LINE: slot 0: F[PP=1,MB=0] layers.1 is in slot 1 of an earlier order already.
        by order([where(MB=0, PASS="F")]) at FILE.py:LINE
        and order([where(PP=1, PASS="F")]) at FILE.py:LINE
    help: list each node once.
""",
)
def a_node_ordered_twice():
    placed_chain().order([where(MB=0, PASS="F")]).order([where(PP=1, PASS="F")])


@expected(
    piper.DirectiveError,
    """
    order[0] at FILE.py:LINE: slot 0: F[PP=0] layers.0 has no group yet.
    help: call plan.place(...) first.
""",
)
def ordering_before_placing():
    chain(2).order([where(PASS="F")])


@expected(
    piper.DirectiveError,
    """
    order[3] at FILE.py:LINE: slot 0: its members are on different groups, so they cannot overlap.
        where(PP=0, MB=1, PASS="F") is on d0
        where(PP=1, MB=0, PASS="F") is on d1
    help: list them as separate slots, or place them on one group.
""",
)
def overlapping_on_different_groups():
    placed_chain().order([(where(PP=0, MB=1, PASS="F"), where(PP=1, MB=0, PASS="F"))])


@expected(
    piper.DirectiveError,
    """
    order[1] at FILE.py:LINE: B[PP=0] fused: the backward of fused stays whole, so it has no BW.
        one kernel gives both
        defined at model.py:7
    help: list PASS="BI" of it too, in whose place all of it runs, or PASS="B".
""",
)
def a_backward_in_one_piece():
    fused = op("fused", 0, splittable=False, whole_because="one kernel gives both", source="model.py:7")
    traced([fused], []).place(where(), group=0).order([where(PASS="F"), where(PASS="BW")])


@expected(
    piper.DirectiveError,
    """
    place[4] at FILE.py:LINE: place comes before order.
    help: call plan.place(...) before plan.order([...]).
""",
)
def placing_after_order():
    placed_chain().order([where(MB=0, PASS="F")]).place(where(PP=0), group=0)


@pytest.mark.parametrize("name", expected.cases)
def test_message(name):
    expected.check(name)
