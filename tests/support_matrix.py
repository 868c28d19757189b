"""The support matrix: its cells, a sample of them, and the page that says how each fared. Needs no JAX."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache
from itertools import combinations
from random import Random

DEVICES, SAMPLE_SIZE, TRIES = 8, 10, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination; ``collectives`` says how those of ZeRO and data parallelism are bundled and spread."""

    schedule: str
    zero: int
    optimizer: str
    model: str
    remat: bool
    stages: int
    data: int
    microbatches: int
    collectives: str

    def __str__(self) -> str:
        remat = "remat-" if self.remat else ""
        layout = f"{self.model}-{remat}{self.stages}x{self.data}-mb{self.microbatches}-{self.collectives}"
        return f"{self.schedule}-ZeRO{self.zero}-{self.optimizer}-{layout}"

    @property
    def is_legal(self) -> bool:
        """Whether the schedule is defined for these counts; the planner refuses the others."""
        return LEGAL[self.schedule](self.stages, self.microbatches)


ANY: Callable[[int, int], bool] = lambda ranks, microbatches: True  # noqa: E731
LEGAL: Mapping[str, Callable[[int, int], bool]] = {
    "GPipe": ANY,
    "1F1B": ANY,
    "Eager1F1B": ANY,
    "Interleaved1F1B": lambda ranks, microbatches: microbatches % ranks == 0,
    "ZBH1": ANY,
    "ZBV": ANY,
    "DualPipeV": lambda ranks, microbatches: microbatches >= 2 * ranks,
    "DualPipe": lambda ranks, microbatches: ranks % 2 == microbatches % 2 == 0 and microbatches >= 2 * ranks,
}
OPTIMIZERS = (
    "adamw", "momentum", "adafactor", "lion", "muon", "decayed kernels", "partly frozen", "accumulated", "finite only",
    "lamb",
)  # fmt: skip
FACTORS: Mapping[str, Sequence[object]] = {
    "schedule": tuple(LEGAL),
    "zero": (0, 1, 2, 3),
    "optimizer": OPTIMIZERS,
    "model": ("even", "tied", "odd"),
    "remat": (False, True),
    "stages": (1, 2, 3, 4),
    "data": (1, 2, 3, 4),
    "microbatches": (2, 3, 4, 8),
    "collectives": ("separate", "joined", "overlapped", "spans"),
}
NAMES = tuple(f.name for f in fields(Cell))
PLAIN = ("adamw", "adafactor", "lamb")
"""Optimizers without ZeRO; the others are in ``test_optimizers.py``."""

LABELS: Mapping[str, str] = {"True": "yes", "False": "no"}

Pair = tuple[tuple[str, object], tuple[str, object]]


def pairs(cell: Cell) -> frozenset[Pair]:
    """The values of every two factors of a cell."""
    return frozenset(combinations(zip(NAMES, astuple(cell), strict=True), 2))


def _cells(random: Random, **fixed: object) -> Iterable[Cell]:
    """Random cells that fit on the devices."""
    while True:
        drawn = {name: random.choice(values) for name, values in FACTORS.items()}
        cell = Cell(**{**drawn, **fixed})  # type: ignore[arg-type]
        if cell.stages * cell.data <= DEVICES:
            yield cell


def _best(cells: Iterable[Cell], covered: set[Pair]) -> Cell:
    """The cell with most values that are not yet covered, then with most pairs; of equal ones the first."""
    known = {value for pair in covered for value in pair}

    def fresh(cell: Cell) -> tuple[int, int]:
        found = pairs(cell)
        return len({value for pair in found for value in pair} - known), len(found - covered)

    return max(cells, key=fresh)


@cache
def cells() -> tuple[Cell, ...]:
    """The whole matrix: schedule x ZeRO x optimizer, the other factors pairwise, and for each refusal a cell."""
    random, covered, found = Random(0), set[Pair](), list[Cell]()
    for schedule in FACTORS["schedule"]:
        for zero in (0, 1, 2, 3):
            for optimizer in OPTIMIZERS if zero else PLAIN:
                drawn = _cells(random, schedule=schedule, zero=zero, optimizer=optimizer)
                cell = _best(_take((c for c in drawn if c.is_legal), TRIES), covered)
                covered |= pairs(cell)
                found.append(cell)
            drawn = (c for c in _take(_cells(random, schedule=schedule, zero=zero), 200) if not c.is_legal)
            found += {(c.stages % 2, c.microbatches >= 2 * c.stages): c for c in drawn}.values()
    return tuple(found)


@cache
def sample() -> tuple[Cell, ...]:
    """A few cells that cover most pairs of the rest: the default suite runs them."""
    covered, found = set[Pair](), list[Cell]()
    rest = [cell for cell in cells() if cell.is_legal and cell.zero]
    for _ in range(SAMPLE_SIZE):
        found.append(_best(rest, covered))
        covered |= pairs(found[-1])
    return tuple(found)


def _take(items: Iterable[Cell], count: int) -> list[Cell]:
    return [cell for cell, _ in zip(items, range(count), strict=False)]


# -- the page ------------------------------------------------------------------------------------------
INTRODUCTION = """# Support matrix

Written by `make test-all` from what its tests found. Every cell takes two steps of a tiny model on virtual CPU devices
and is compared with one device: loss, every gradient, every parameter, every optimizer leaf; and after each step all
copies of a parameter are equal bit for bit. Schedule x ZeRO x optimizer is whole; the other factors are pairwise.
"""


def page(outcomes: Mapping[Cell, str]) -> str:
    """The page as Markdown.

    Args:
      outcomes: for each cell ``""`` if it passed, else the reason why the planner refuses it.
    """
    reasons = list(dict.fromkeys(reason for reason in outcomes.values() if reason))
    passed = {cell: reason for cell, reason in outcomes.items() if not reason}
    others = [_table(name, passed, ()) for name in FACTORS if name not in ("schedule", "zero")]
    tables = [_table("schedule", outcomes, reasons), "The same cells by their other factors:", *others]
    notes = "\n".join(f"{k}. {reason}" for k, reason in enumerate(reasons, 1))
    return "\n\n".join([INTRODUCTION.strip(), *tables, "Refused by the planner, with its reason:", notes]) + "\n"


def _table(name: str, outcomes: Mapping[Cell, str], reasons: Sequence[str]) -> str:
    """One row for each value of a factor, one column for each stage of ZeRO."""
    stages = FACTORS["zero"]
    lines = [f"| {name} | {' | '.join(f'ZeRO-{zero}' for zero in stages)} |", f"|---|{'---|' * len(stages)}"]
    for value in FACTORS[name]:
        found = [[c for c in outcomes if getattr(c, name) == value and c.zero == zero] for zero in stages]
        entries = (_entry(cells_of, outcomes, reasons) for cells_of in found)
        lines.append(f"| {LABELS.get(str(value), str(value))} | {' | '.join(entries)} |")
    return "\n".join(lines)


def _entry(found: Sequence[Cell], outcomes: Mapping[Cell, str], reasons: Sequence[str]) -> str:
    refused = [outcomes[cell] for cell in found if outcomes[cell]]
    numbers = ", ".join(str(1 + reasons.index(reason)) for reason in sorted(set(refused), key=reasons.index))
    passed = f"{len(found) - len(refused)} passed" if found else "-"
    return passed + (f", {len(refused)} refused ({numbers})" if refused else "")


def reason(error: Exception) -> str:
    """What an error of the planner says of the counts that it refuses, without the counts of the case."""
    text = re.sub(r"num_microbatches=\d+", "this num_microbatches", str(error).splitlines()[0])
    text = re.sub(r"pipeline_parallel=\d+", "pipeline_parallel", text)
    return re.sub(r"from \d+", "from twice the pipeline degree", text)
