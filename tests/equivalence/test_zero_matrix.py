"""ZeRO-1, 2 and 3 take the steps of one device: the support matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from support_matrix import Cell, cells, reason, sample
from zero_problems import assert_steps_and_copies, of_cell, problem

import piper_jax as piper


@cache
def traced(model: str) -> piper.Plan:
    found = problem(model, "momentum")
    return piper.trace(found.loss_fn, found.params, found.batch, optimizer=found.optimizer)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "cell", [pytest.param(c, id=str(c), marks=() if c in sample() else pytest.mark.full) for c in cells()]
)
def test_cell(cell: Cell, record_property: Callable[[str, object], None]) -> None:
    if not cell.is_legal:
        with pytest.raises(piper.DirectiveError) as refused:
            traced("even").apply(of_cell(cell))
        record_property("cell", str(cell))
        record_property("refused", reason(refused.value))
        return
    found = problem(cell.model, cell.optimizer)
    assert_steps_and_copies(found, found.parallelize(of_cell(cell)))
    record_property("cell", str(cell))
