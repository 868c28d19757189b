"""Every schedule takes the steps of the one-device reference: a sample by default, the whole table under ``full``."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from oracle import Problem, assert_equivalent, momentum
from support_matrix import LEGAL
from tiny_models import Tower, mean_loss, tokens, weighted_loss

import piper_jax as piper

pytestmark = pytest.mark.matrix


@cache
def problem(kind: str) -> Problem:
    """``uneven``: nine layers; ``tied``: the head is the embedding; ``masked``: a weighted loss over padding."""
    match kind:
        case "even":
            return Problem(loss_fn=mean_loss, params=Tower(layers=6), batch=tokens())
        case "uneven":
            return Problem(loss_fn=mean_loss, params=Tower(layers=9, skip=True), batch=tokens(), optimizer=momentum())
        case "tied":
            return Problem(loss_fn=mean_loss, params=Tower(layers=6, tied=True), batch=tokens())
        case "tied eight":
            return Problem(loss_fn=mean_loss, params=Tower(layers=8, tied=True), batch=tokens())
        case _:
            return Problem(loss_fn=weighted_loss, params=Tower(layers=6), batch=tokens())


# schedule, ranks, microbatches, model, data parallel, options: each pair of columns meets at least once where legal
CASES = [
    ("GPipe", 3, 2, "tied", 2, {}),
    ("1F1B", 4, 2, "uneven", 1, {"memory_optimization": "activation_checkpointing"}),
    ("Eager1F1B", 3, 6, "masked", 1, {}),
    ("Interleaved1F1B", 2, 2, "tied", 2, {"num_virtual_stages": 3}),
    ("Interleaved1F1B", 3, 6, "even", 1, {"communication_overlap": True}),
    ("Interleaved1F1B", 3, 4, "uneven", 2, {"interleaved_schedule": "breadth_first"}),
    ("ZBH1", 4, 4, "tied", 2, {}),
    ("ZBH1", 3, 2, "uneven", 1, {"memory_optimization": "activation_checkpointing"}),
    ("ZBV", 2, 4, "tied", 2, {}),
    ("ZBV", 4, 2, "uneven", 1, {}),
    ("DualPipeV", 2, 4, "tied", 2, {}),
    ("DualPipeV", 3, 6, "even", 1, {"memory_optimization": "activation_checkpointing"}),
    ("DualPipe", 2, 4, "tied", 2, {}),
    ("DualPipe", 4, 8, "masked", 1, {"communication_overlap": False}),
]


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "kind", "data", "options"),
    [pytest.param(*case, id="-".join(map(str, case[:4]))) for case in CASES],
)
def test_schedule(
    schedule: str, ranks: int, microbatches: int, kind: str, data: int, options: dict[str, object]
) -> None:
    strategy = piper.Strategy(
        pipeline_parallel=ranks,
        data_parallel=data,
        num_microbatches=microbatches,
        directives=(piper.directive(schedule, **options),),
    )
    train = assert_equivalent(problem(kind), strategy)
    assert len(train.plan.groups) == ranks


# -- the whole table: three steps of every cell that is legal; the others are refused with the rule ----------
WHOLE = [
    (schedule, ranks, microbatches, kind)
    for schedule, ranks, kind in product(LEGAL, (2, 3, 4), ("uneven", "tied eight"))
    for microbatches in (ranks - 1, ranks, 2 * ranks)
]


def planned(schedule: str, ranks: int, microbatches: int) -> piper.Strategy:
    named = (piper.directive(schedule),)
    return piper.Strategy(pipeline_parallel=ranks, num_microbatches=microbatches, directives=named)


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "ranks", "microbatches", "kind"), [c for c in WHOLE if LEGAL[c[0]](*c[1:3])])
def test_whole(schedule: str, ranks: int, microbatches: int, kind: str) -> None:
    assert_equivalent(problem(kind), planned(schedule, ranks, microbatches))


@cache
def traced() -> piper.Plan:
    even = problem("even")
    return piper.trace(even.loss_fn, even.params, even.batch, optimizer=even.optimizer)


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches"), dict.fromkeys(c[:3] for c in WHOLE if not LEGAL[c[0]](*c[1:3]))
)
def test_other_counts_are_refused_with_the_nearest_legal_ones(schedule: str, ranks: int, microbatches: int) -> None:
    with pytest.raises(piper.DirectiveError, match=r"takes|must be") as caught:
        traced().apply(planned(schedule, ranks, microbatches))
    assert caught.value.help.startswith(("use num_microbatches=", "use pipeline_parallel="))
