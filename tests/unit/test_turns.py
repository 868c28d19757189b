"""Two passes of a program take turns, and each exchange of one lies beside products of the other."""

from __future__ import annotations

from itertools import pairwise

import pytest

from piper_jax.lowering.turns import Products, turns

NONE: Products = ()
SOME: Products = ((3, 10), (5, 10))
MANY: Products = ((1, 10), (4, 90), (6, 40), (9, 40), (12, 10))


def shown(longer: list[Products], shorter: list[Products]) -> str:
    return " ".join(
        f"{'AB'[not t.is_longer]}{t.segment}" + (f"[{t.start}:{t.stop or ''}]" if t.start or t.stop else "")
        for t in turns(longer, shorter)
    )


@pytest.mark.parametrize(
    ("longer", "shorter", "order"),
    [
        # Equal ones: a backward, with nothing in the beginning, and a forward, with nothing in the end.
        ([NONE, SOME, SOME], [SOME, SOME, NONE], "A0 B0 A1 B1 A2 B2"),
        # A forward of two layers, and a backward of one: what has most work is cut, into about equal parts.
        ([SOME, SOME, SOME, SOME, NONE], [NONE, SOME, MANY], "B0 A0 B1 A1 B2[0:6] A2 B2[6:9] A3 B2[9:] A4"),
        # The same with the head in its first segment.
        ([SOME, SOME, SOME, SOME, NONE], [MANY, SOME, SOME], "A0 B0[0:6] A1 B0[6:] A2 B1 A3 B2 A4"),
        # One pass has no experts.
        ([NONE, SOME, SOME], [SOME], "A0 B0[0:5] A1 B0[5:] A2"),
        # Too few products: the last exchange has nothing beside it.
        ([NONE, SOME, SOME, SOME], [SOME], "A0 B0[0:5] A1 B0[5:] A2 A3"),
    ],
)
def test_the_longer_runs_whole_and_the_shorter_is_cut(longer: list[Products], shorter: list[Products], order: str):
    assert shown(longer, shorter) == order


@pytest.mark.parametrize("num_longer", range(2, 9))
@pytest.mark.parametrize("num_shorter", range(2, 9))
def test_every_exchange_is_followed_by_products_of_the_other_pass(num_longer: int, num_shorter: int) -> None:
    forward, backward = [*[MANY] * num_shorter, NONE], [NONE, *[MANY] * num_longer]
    longer, shorter = (backward, forward) if num_longer >= num_shorter else (forward, backward)
    order = turns(longer, shorter)
    segments = {True: longer, False: shorter}
    for before, after in pairwise(order):
        given = segments[before.is_longer]
        if before.stop is None and before.segment < len(given) - 1:  # an exchange starts
            assert after.is_longer is not before.is_longer
            positions = [k for k, _ in segments[after.is_longer][after.segment]]
            assert any(after.start <= k < (after.stop or 99) for k in positions)
    for is_longer, given in segments.items():
        pieces = [t for t in order if t.is_longer is is_longer]
        assert [t.segment for t in pieces if t.stop is None] == list(range(len(given)))
        assert all(b.start == (a.stop or 0) for a, b in pairwise(pieces))
