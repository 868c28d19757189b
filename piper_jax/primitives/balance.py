"""Dividing a row of costs into consecutive parts whose largest is least."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

NEAR, WIDE, SLACK = 1 / 16, 1.5, 1.05


def stages_at_borders(costs: Sequence[int], crossing: Sequence[int], stages: int) -> list[range]:
    """As :func:`balanced_stages`, but no part ends in the midst of what belongs together where that costs little.

    A boundary is wide if more than 1.5 times the bytes cross it than another one within a sixteenth of all costs. Where
    the largest part without wide boundaries is at most 5 % above the least, there are none.
    """
    best = balanced_stages(costs, crossing, stages)
    ends = _narrow_ends(costs, crossing)
    runs = [range(first, last) for first, last in pairwise((0, *ends, len(costs)))]
    if len(runs) in (len(costs), *range(stages)):
        return best
    work = [sum(costs[i] for i in run) for run in runs]
    found = balanced_stages(work, [crossing[run[-1]] for run in runs], stages)
    parts = [range(runs[part[0]].start, runs[part[-1]].stop) for part in found]
    return parts if _largest(costs, parts) <= SLACK * _largest(costs, best) else best


def _narrow_ends(costs: Sequence[int], crossing: Sequence[int]) -> list[int]:
    """Where parts may end so that no wide boundary is used."""
    totals = [*accumulate(costs)]
    window = NEAR * totals[-1]
    ends: list[int] = []
    for i in range(len(costs) - 1):
        near = crossing[
            bisect_left(totals, totals[i] - window) : bisect_right(totals, totals[i] + window, hi=len(costs) - 1)
        ]
        if crossing[i] <= WIDE * min((n for n in near if n), default=0):
            ends.append(i + 1)
    return ends


def _largest(costs: Sequence[int], parts: Sequence[range]) -> int:
    return max(sum(costs[i] for i in part) for part in parts)


def balanced_stages(costs: Sequence[int], crossing: Sequence[int], stages: int) -> list[range]:
    """Consecutive parts, one per stage, none empty.

    Args:
      costs: cost of each unit.
      crossing: bytes that cross the boundary after each unit.
      stages: number of parts, at most the number of units.

    Returns:
      The parts with the least largest cost; among those the least bytes over all boundaries, then the least sum of
      squared costs, then the latest boundaries.
    """
    totals = [0, *accumulate(costs)]
    limit = _least_limit(totals, max(costs, default=0), stages)
    num_units = len(costs)
    best: list[tuple[int, int] | None] = [(0, 0), *[None] * num_units]
    choices: list[list[int]] = []
    for _ in range(stages):
        following: list[tuple[int, int] | None] = [None] * (num_units + 1)
        choice = [0] * (num_units + 1)
        for end in range(1, num_units + 1):
            for start in range(end - 1, -1, -1):
                cost, before = totals[end] - totals[start], best[start]
                if cost > limit:
                    break
                if before is None:
                    continue
                key = (before[0] + (crossing[start - 1] if start else 0), before[1] + cost * cost)
                known = following[end]
                if known is None or key < known:
                    following[end], choice[end] = key, start
        best = following
        choices.append(choice)
    parts: list[range] = []
    end = num_units
    for choice in reversed(choices):
        parts.append(range(choice[end], end))
        end = choice[end]
    return parts[::-1]


def _least_limit(totals: Sequence[int], largest: int, stages: int) -> int:
    """The least largest cost: binary search over what greedy filling needs."""
    low, high = max(largest, -(-totals[-1] // stages)), totals[-1]
    while low < high:
        middle = (low + high) // 2
        if _parts_needed(totals, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _parts_needed(totals: Sequence[int], limit: int) -> int:
    parts, start = 1, 0
    for i in range(1, len(totals)):
        if totals[i] - totals[start] > limit:
            parts, start = parts + 1, i - 1
    return parts
