"""Encoders with decoders, towers side by side, long skips: with regions and without."""

from __future__ import annotations

from typing import Any

import pytest
from graph_shapes import EncoderDecoder, Shape, TwoTowers, UNet, pairs, shape_loss
from oracle import Problem, assert_equivalent, strategy

import piper_jax as piper
from piper_jax.planning.plan import Plan

full = pytest.mark.full


def shape_problem(model: Shape, *, rows: int = 16) -> Problem:
    return Problem(loss_fn=shape_loss, params=model, batch=pairs(rows), steps=2)


@pytest.mark.parametrize(
    ("shape", "changes", "stages", "schedule"),
    [
        pytest.param(EncoderDecoder, {}, 4, "1F1B", marks=full),
        (EncoderDecoder, {}, 2, "ZBH1"),
        pytest.param(EncoderDecoder, {"regions": False}, 3, "1F1B", marks=full),
        pytest.param(TwoTowers, {}, 4, "1F1B", marks=full),
        pytest.param(TwoTowers, {"interleaved": True}, 4, "ZBH1", marks=full),
        pytest.param(TwoTowers, {}, 2, "DualPipeV", marks=full),
        pytest.param(TwoTowers, {"regions": False}, 2, "1F1B", marks=full),
        pytest.param(UNet, {}, 3, "1F1B", marks=full),
        pytest.param(UNet, {"regions": False}, 3, "1F1B", marks=full),
        pytest.param(UNet, {}, 2, "ZBV", marks=full),
    ],
)
def test_shape(shape: type[Shape], changes: dict[str, Any], stages: int, schedule: str) -> None:
    assert_equivalent(
        shape_problem(shape(**changes)), strategy(stages=stages, data=2, microbatches=4, schedule=schedule)
    )


def test_towers_are_units_in_the_order_of_entry() -> None:
    """No edge goes from one tower to the other before they meet, so their stages run side by side."""
    for interleaved, edges in ((False, {(0, 1), (2, 3), (1, 3)}), (True, {(0, 2), (1, 3), (2, 3)})):
        plan = piper.trace(shape_loss, TwoTowers(interleaved=interleaved), pairs(16)).cut(stages=4)
        assert _edges(plan) == edges


def _edges(plan: Plan) -> set[tuple[int, int]]:
    """Which stage's forward reads what another's gives."""
    ends = ((edge.src, edge.dst) for edge in plan.dag.data)
    return {(a.PP, b.PP) for a, b in ends if (a.PASS, b.PASS) == ("F", "F") and a.PP != b.PP}


@full
def test_a_tower_without_gradients_has_no_backward() -> None:
    """``stop_gradient`` at the end of a tower: its stages have forwards alone."""
    problem = shape_problem(TwoTowers(frozen=True))
    train = assert_equivalent(problem, strategy(stages=4, data=2, microbatches=4, zero_stage=1))
    assert {n.id.PP for n in train.plan.dag.nodes.values() if n.id.PASS == "B"} == {2, 3}
