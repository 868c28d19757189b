"""Level of detail: spans too narrow to be seen become bands, which show how much of the time each colour takes.

One by one they would give stripes that follow the pixels and not the schedule (moire), and files of many megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from piper_jax.visualization.palette import COLORS

Shades = dict[tuple[str, int], float]  # time by color and shade
DOZEN = 12  # whole periods of patterns of 1, 2, 3, 4 or 6 spans, so that a steady state gives equal bands
SAME = 0.04  # neighbours whose shares differ less are one band
RANKS = {color: rank for rank, color in enumerate(COLORS)}


class Band(NamedTuple):
    """Many spans of a lane between two times; ``times`` says for how long each color and shade runs."""

    lane: int
    start: float
    end: float
    times: Shades

    def strips(self) -> Iterator[tuple[str, int, float, float]]:
        """Color, shade, and the lower and upper edge in [0, 1]: a stack in the order of the legend from the top."""
        low, length = 0.0, self.end - self.start
        for color, shade in sorted(self.times, key=lambda key: (-RANKS[key[0]], -key[1])):
            high = low + self.times[color, shade] / length
            yield color, shade, low, min(high, 1.0)
            low = high

    def is_like(self, other: Band) -> bool:
        """Whether ``other`` follows directly, with the same shares."""
        lengths = self.end - self.start, other.end - other.start
        if self.end != other.start:
            return False
        differences = (
            self.times.get(key, 0.0) / lengths[0] - other.times.get(key, 0.0) / lengths[1]
            for key in self.times.keys() | other.times.keys()
        )
        return all(abs(difference) < SAME for difference in differences)

    def with_next(self, other: Band) -> Band:
        """This band and ``other``, which follows, as one."""
        times = {
            key: self.times.get(key, 0.0) + other.times.get(key, 0.0) for key in self.times.keys() | other.times.keys()
        }
        return self._replace(end=other.end, times=times)


def runs(times: Sequence[tuple[float, float]], narrow: float) -> Iterator[range]:
    """Divides the spans of a lane, by start: one of at least ``narrow`` alone, narrower ones together by dozens.

    A gap of more than ``narrow`` ends a run, so that idle time that can be seen stays what it is.
    """
    first, begin, before = 0, 0.0, 0.0
    for number, (start, end) in enumerate(times):
        is_wide = end - start >= narrow
        if number > first and (is_wide or start - before > narrow):
            yield range(first, number)
            first = number
        if number == first:
            begin = start
        if is_wide or ((number + 1 - first) % DOZEN == 0 and end - begin >= 2 * narrow):
            yield range(first, number + 1)
            first = number + 1
        before = end
    if first < len(times):
        yield range(first, len(times))


def joined(bands: Sequence[Band], narrow: float) -> list[Band]:
    """Bands of one lane without the small gaps between them, and with equal neighbours as one."""
    found: list[Band] = []
    for band in bands:
        if found and 0 < band.start - found[-1].end <= narrow:
            found[-1] = found[-1]._replace(end=band.start)
        if found and found[-1].is_like(band):
            found[-1] = found[-1].with_next(band)
        else:
            found.append(band)
    return found
