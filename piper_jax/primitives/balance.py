"""Dividing a row of costs into consecutive parts whose largest is least."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


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
