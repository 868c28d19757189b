"""Filters: what they select, and that they print as written."""

from __future__ import annotations

import pytest
from traced_dags import chain, experts

from piper_jax import FilterError, where
from piper_jax.ir.selection import select


def texts(plan, filter):
    return [str(node) for node in select(plan.dag, filter)]


@pytest.mark.parametrize(
    ("filter", "text"),
    [
        (where(), "where()"),
        (where(PP=0, PASS="F"), 'where(PP=0, PASS="F")'),
        (where(MB=range(0, 4, 2), PP=(1, 3)), "where(PP=(1, 3), MB=range(0, 4, 2))"),
        (where("layers.0", PASS=("F", "B")), 'where(PASS=("F", "B"), path="layers.0")'),
        (~where(EP=...) & where(PP=1), "(~where(EP=...) & where(PP=1))"),
        (where(PP=0) | where(PP=1), "(where(PP=0) | where(PP=1))"),
    ],
)
def test_filters_print_as_the_call_that_makes_them(filter, text):
    assert str(filter) == text
    assert eval(text, {"where": where}) == filter


def test_where_selects_all_computation_and_no_update():
    plan = chain(2)
    assert texts(plan, where()) == ["F[PP=0] layers.0", "F[PP=1] layers.1", "B[PP=1] layers.1", "B[PP=0] layers.0"]
    assert texts(plan, where(PASS="U")) == ["U update layers.0", "U update layers.1"]
    assert texts(plan, ~where(PASS="F")) == ["B[PP=1] layers.1", "B[PP=0] layers.0"]


def test_coordinates_take_numbers_ranges_tuples_and_any():
    plan = chain(4).split(where(), num_microbatches=4)
    assert texts(plan, where(PP=3, MB=2, PASS="F")) == ["F[PP=3,MB=2] layers.3"]
    assert texts(plan, where(PP=(0, 2), MB=range(1, 4, 2), PASS="F")) == [
        "F[PP=0,MB=1] layers.0",
        "F[PP=0,MB=3] layers.0",
        "F[PP=2,MB=1] layers.2",
        "F[PP=2,MB=3] layers.2",
    ]
    assert len(select(plan.dag, where(MB=...))) == 32
    assert texts(experts(1), where(EP=..., PASS="F")) == ["F[PP=0,EP=0] layers.0.experts"]


def test_backward_selects_both_halves():
    plan = chain(1).split(where(), num_microbatches=1).place(where(), group=0)
    plan = plan.order([where(PASS="F"), where(PASS="BI"), where(PASS="BW")])
    assert texts(plan, where(PASS="B")) == ["BI[PP=0,MB=0] layers.0", "BW[PP=0,MB=0] layers.0"]
    assert texts(plan, where(PP=0, MB=0, PASS="B")) == ["BI[PP=0,MB=0] layers.0", "BW[PP=0,MB=0] layers.0"]


def test_paths_select_by_prefix_and_pattern():
    plan = experts(2)
    assert texts(plan, where("layers.1", PASS="F")) == [
        "F[PP=1] layers.1.gate",
        "F[PP=1,EP=0] layers.1.experts",
        "F[PP=1] layers.1.combine",
    ]
    assert texts(plan, where("*.experts", PASS="B")) == [
        "B[PP=1,EP=0] layers.1.experts",
        "B[PP=0,EP=0] layers.0.experts",
    ]
    merged = plan.cut(stages=1)
    assert texts(merged, where("layers.1.gate", PASS="F")) == ["F[PP=0] layers.0.combine-layers.1.gate"]


def test_combinations_keep_node_order_and_count_each_node_once():
    plan = chain(3)
    union = where(PP=2) | where(PASS="F")
    assert texts(plan, union) == ["F[PP=0] layers.0", "F[PP=1] layers.1", "F[PP=2] layers.2", "B[PP=2] layers.2"]
    assert texts(plan, where(PASS="F") & ~where(PP=(0, 1))) == ["F[PP=2] layers.2"]


@pytest.mark.parametrize("value", [-1, True, 1.0, "0", (0, -1)])
def test_coordinates_are_numbers_from_zero(value):
    with pytest.raises(FilterError, match="not a coordinate"):
        where(PP=value)
