"""Which piece of one pass is computed beside which exchange of another, where a program runs both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

Products = Sequence[tuple[int, int]]
"""Of a segment, which is what a pass computes between two exchanges: positions of matrix products, with their FLOPs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A piece of a segment: its positions from ``start`` to ``stop``; None is the end, where the exchange starts.

    Attributes:
      is_longer: whether it is of the pass with more exchanges.
    """

    is_longer: bool
    segment: int
    start: int = 0
    stop: int | None = None


def turns(longer: Sequence[Products], shorter: Sequence[Products]) -> tuple[Turn, ...]:
    """The order of two passes in which each exchange of one is followed by products of the other.

    Between two segments of a pass is an exchange. The one with more of them runs its segments whole; where the other
    has too few, they are cut at products. Equal ones, with exchanges (e) only shown beside what covers them::

        longer      0 e     1 e     2
        shorter       0 e     1 e     2
    """
    counts = _counts(len(longer) - 1, longer[-1], shorter)
    pieces = (piece for k, count in enumerate(counts) for piece in _cut(k, shorter[k], count))
    order = [] if counts[0] else [next(pieces)]  # it has no product that could cover anything
    order.append(Turn(is_longer=True, segment=0))
    for k in range(1, len(longer)):
        order += [*islice(pieces, 1), Turn(is_longer=True, segment=k)]
    return (*order, *pieces)


def _counts(num_exchanges: int, last: Products, shorter: Sequence[Products]) -> list[int]:
    """How many exchanges of the longer pass each segment of the shorter covers.

    Each covers one, but for the last, whose own exchange is before it and may be covered by the ``last`` of the longer;
    then those with most work for each more.
    """
    counts = [0] * len(shorter)
    ends = [] if last else [len(shorter) - 1]
    for k in (*range(1, len(shorter) - 1), *ends, 0):
        counts[k] += bool(shorter[k]) and not counts[k] and sum(counts) < num_exchanges
    while sum(counts) < num_exchanges:
        free = [k for k, products in enumerate(shorter) if counts[k] < len(products)]
        if not free:
            break
        most = max(free, key=lambda k: sum(flops for _, flops in shorter[k]) / (counts[k] + 1))
        counts[most] += 1
    return counts


def _cut(segment: int, products: Products, count: int) -> Iterator[Turn]:
    """Pieces with about the same work, each of at least one product."""
    starts, done, total = [0], 0, sum(flops for _, flops in products)
    for k, (position, flops) in enumerate(products):
        missing = count - len(starts)
        is_due = done * count >= total * len(starts) or len(products) - k == missing
        if k and missing > 0 and is_due:
            starts.append(position)
        done += flops
    for start, stop in pairwise((*starts, None)):
        yield Turn(is_longer=False, segment=segment, start=start or 0, stop=stop)
