"""Times calls in turn, in one process, on a machine that others may use at the same time."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

STAT = Path("/proc/stat")
QUIET_SHARE = 0.1
LONGEST_WAIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One call: its wall and processor seconds, and the share of the machine that other processes took meanwhile."""

    seconds: float
    cpu_seconds: float
    foreign_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rounds of two calls, one of each a round.

    Attributes:
      ours, theirs: samples of the quiet rounds; of all rounds where none was quiet.
      num_rounds: how many rounds were run.  quiet: whether the samples are those of quiet rounds.
    """

    ours: tuple[Sample, ...]
    theirs: tuple[Sample, ...]
    num_rounds: int
    quiet: bool

    @property
    def ratio(self) -> float:
        """Median over rounds of ours / theirs within a round: steadier than a ratio of medians."""
        return statistics.median(self._ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile of the ratio."""
        first, _, third = statistics.quantiles(self._ratios, n=4)
        return first, third

    @property
    def cpu_ratio(self) -> float:
        """The ratio of processor seconds."""
        return statistics.median(a.cpu_seconds / b.cpu_seconds for a, b in self._pairs)

    @property
    def seconds(self) -> tuple[float, float]:
        """Median seconds of ours and theirs."""
        return statistics.median(s.seconds for s in self.ours), statistics.median(s.seconds for s in self.theirs)

    @property
    def difference_seconds(self) -> float:
        """Median over rounds of ours - theirs."""
        return statistics.median(a.seconds - b.seconds for a, b in self._pairs)

    @property
    def cpu_difference_seconds(self) -> float:
        """Median over rounds of ours - theirs in processor seconds, which a busy machine disturbs less."""
        return statistics.median(a.cpu_seconds - b.cpu_seconds for a, b in self._pairs)

    def __str__(self) -> str:
        kept = (
            f"{len(self.ours)} quiet of {self.num_rounds} rounds" if self.quiet else f"{self.num_rounds} noisy rounds"
        )
        return f"{self.ratio:.3f}   (quartiles {self.quartiles[0]:.3f}-{self.quartiles[1]:.3f}, {kept})"

    @property
    def _pairs(self) -> list[tuple[Sample, Sample]]:
        return list(zip(self.ours, self.theirs, strict=True))

    @property
    def _ratios(self) -> list[float]:
        return [a.seconds / b.seconds for a, b in self._pairs]


def compare(ours: Callable[[], Any], theirs: Callable[[], Any], *, rounds: int, calls: int = 1) -> Comparison:
    """Runs both calls ``rounds`` times, in turn, the first to go changing every round.

    A round starts when the machine is idle, or after 10 seconds. Rounds in which other processes take more than a tenth
    of the machine are left out, unless fewer than three remain.

    Args:
      ours, theirs: what to time, each until the values that it returns are there.
      calls: calls in a row that make one sample, for short ones.
    """
    found: list[tuple[Sample, Sample]] = []
    for index in range(rounds):
        wait_until_idle()
        if index % 2:
            second = sample(theirs, calls)
            found.append((sample(ours, calls), second))
        else:
            first = sample(ours, calls)
            found.append((first, sample(theirs, calls)))
    return comparison(found)


def comparison(found: Sequence[tuple[Sample, Sample]]) -> Comparison:
    """The quiet ones of some rounds; all of them if fewer than three are quiet."""
    quiet = [pair for pair in found if max(s.foreign_share for s in pair) <= QUIET_SHARE]
    kept = quiet if len(quiet) >= 3 else found
    a, b = zip(*kept, strict=True)
    return Comparison(ours=a, theirs=b, num_rounds=len(found), quiet=kept is quiet)


def sample(call: Callable[[], Any], calls: int = 1) -> Sample:
    """Runs ``call`` ``calls`` times, each until the values that it returns are there."""
    busy, cpu, start = _busy_seconds(), time.process_time(), time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(call())
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    foreign = (_busy_seconds() - busy - cpu_seconds) / seconds / (os.cpu_count() or 1)
    return Sample(seconds=seconds / calls, cpu_seconds=cpu_seconds / calls, foreign_share=max(0.0, foreign))


def wait_until_idle() -> None:
    """Returns when other processes take less than a tenth of the machine, or after 10 seconds."""
    end = time.monotonic() + LONGEST_WAIT_SECONDS
    while STAT.exists() and time.monotonic() < end:
        busy = _busy_seconds()
        time.sleep(0.5)
        if _busy_seconds() - busy <= 0.5 * QUIET_SHARE * (os.cpu_count() or 1):
            return


def _busy_seconds() -> float:
    """Processor seconds of all processes since boot, where the system tells."""
    if not STAT.exists():
        return time.process_time()
    user, nice, system, _, _, *interrupts = map(int, STAT.read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
