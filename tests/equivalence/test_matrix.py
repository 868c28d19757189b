"""GPipe and 1F1B: stages, microbatches below, equal to and above the stages, replicas; pairwise by default."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from oracle import Problem, assert_equivalent, momentum, strategy
from tiny_models import Tower, tokens, weighted_loss

STAGES, MICROBATCHES, REPLICAS = (1, 2, 3, 4), (1, 2, 4, 6), (1, 2, 3, 4)
DEVICES, ROWS = 8, 144

PAIRWISE = [  # each legal pair of two columns is in some row
    ("GPipe", 1, 1, 4), ("1F1B", 1, 2, 3), ("GPipe", 1, 4, 1), ("1F1B", 1, 6, 2),
    ("1F1B", 2, 1, 3), ("GPipe", 2, 2, 4), ("1F1B", 2, 4, 2), ("GPipe", 2, 6, 1),
    ("GPipe", 3, 1, 2), ("1F1B", 3, 2, 1), ("GPipe", 3, 4, 2), ("1F1B", 3, 6, 1),
    ("1F1B", 4, 1, 1), ("GPipe", 4, 2, 2), ("1F1B", 4, 4, 1), ("GPipe", 4, 6, 2),
    ("1F1B", 1, 4, 4), ("GPipe", 2, 4, 3), ("GPipe", 1, 6, 3), ("1F1B", 2, 6, 4),
]  # fmt: skip
WHOLE = [c for c in product(("GPipe", "1F1B"), STAGES, MICROBATCHES, REPLICAS) if c[1] * c[3] <= DEVICES]


def test_the_sample_is_pairwise() -> None:
    def pairs(cells: list[tuple]) -> set:
        return {((i, c[i]), (j, c[j])) for c in cells for i in range(4) for j in range(i)}

    assert pairs(PAIRWISE) == pairs(WHOLE)


@cache
def problem() -> Problem:
    return Problem(
        loss_fn=weighted_loss, params=Tower(layers=4, tied=True), batch=tokens(ROWS), optimizer=momentum(), steps=2
    )


def _check(schedule: str, stages: int, microbatches: int, data: int) -> None:
    train = assert_equivalent(
        problem(), strategy(stages=stages, data=data, microbatches=microbatches, schedule=schedule)
    )
    assert (train.plan.num_stages, train.plan.num_microbatches) == (stages, microbatches)


@pytest.mark.parametrize(("schedule", "stages", "microbatches", "data"), PAIRWISE)
def test_pairwise(schedule: str, stages: int, microbatches: int, data: int) -> None:
    _check(schedule, stages, microbatches, data)


@pytest.mark.full
@pytest.mark.matrix
@pytest.mark.parametrize(("schedule", "stages", "microbatches", "data"), [c for c in WHOLE if c not in PAIRWISE])
def test_whole(schedule: str, stages: int, microbatches: int, data: int) -> None:
    _check(schedule, stages, microbatches, data)
