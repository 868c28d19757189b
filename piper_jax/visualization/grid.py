"""The text grid: a row for each device group, a column for each tick of the clock."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

from piper_jax.simulation.report import Report, Span
from piper_jax.visualization.labels import has_several_stages, row_names, span_label, time_text

EXACT_COLUMNS = 100_000
DRAWN_COLUMNS = 120


def grid_text(report: Report, *, max_columns: int | None = None) -> str:
    """The schedule as text: ``F0`` starts a task of microbatch 0, ``=`` continues it, ``.`` is idle.

    Where groups hold several stages a task reads ``2F0``, the stage first; ``F1+ B0 =`` is an overlap slot of two
    tasks. Updates and communication that take no time are not shown; what takes time on the compute stream is.

        1f1b  stages=3 microbatches=4  F=1 B=2  makespan=18  bubble=0.333
        0 | F0 F1 F2 .  .  .  .  B0 =  F3 B1 =  .  B2 =  .  B3 =
        1 | .  F0 F1 .  .  B0 =  F2 B1 =  F3 B2 =  .  B3 =  .  .
        2 | .  .  F0 B0 =  F1 B1 =  F2 B2 =  F3 B3 =  .  .  .  .

    Times in seconds have no common tick: rows are then 120 characters to scale, labels cut to the room they have.

    Args:
      max_columns: show no more than the first so many ticks (or characters); None shows all.
    """
    spans = [span for span in report.timeline if span.stream.startswith("compute")]
    tick = _tick(report, spans)
    if tick is None:
        rows = _scaled_rows(report, spans)
    else:
        cells = _cells(report, spans, tick)
        width = max((len(cell) for row in cells for cell in row[:max_columns]), default=1) + 1
        rows = ["".join(cell.ljust(width) for cell in row[:max_columns]).rstrip() for row in cells]
        rows = [
            row + ("  ..." if len(all_cells) > len(all_cells[:max_columns]) else "")
            for row, all_cells in zip(rows, cells, strict=True)
        ]
    names = row_names([group.name for group in report.groups])
    margin = max((len(name) for name in names), default=0)
    return "\n".join(
        [heading_text(report), *(f"{name.rjust(margin)} | {row}" for name, row in zip(names, rows, strict=True))]
    )


def heading_text(report: Report) -> str:
    """One line: name, sizes, costs, makespan and bubble."""
    parts = (
        report.title,
        f"stages={report.num_stages} microbatches={report.num_microbatches}",
        report.costs,
        f"makespan={time_text(report.makespan, report.time_unit)}",
        f"bubble={report.bubble:.3f}",
    )
    return "  ".join(part for part in parts if part)


def _tick(report: Report, spans: Sequence[Span]) -> float | None:
    """The longest tick of which all times are multiples, or None."""
    if report.time_unit:
        return None
    times = {span.start for span in spans} | {span.end for span in spans}
    fractions = [Fraction(time).limit_denominator(60) for time in times]
    if any(abs(float(found) - time) > 1e-9 for found, time in zip(fractions, times, strict=True)):
        return None
    denominator = lcm(*(found.denominator for found in fractions))
    numerator = gcd(*(int(found * denominator) for found in fractions)) or 1
    tick = numerator / denominator
    return tick if report.makespan / tick <= EXACT_COLUMNS else None


def _cells(report: Report, spans: Sequence[Span], tick: float) -> list[list[str]]:
    several_stages = has_several_stages(report)
    num_columns = round(report.makespan / tick)
    rows: dict[str, list[str]] = {group.name: ["."] * num_columns for group in report.groups}
    for span in spans:
        first, last = round(span.start / tick), round(span.end / tick)
        rows[span.group][first:last] = _span_cells(span_label(span, several_stages=several_stages), last - first)
    return list(rows.values())


def _span_cells(label: str, size: int) -> list[str]:
    """``F1+B0`` takes a cell for each of its tasks if it has as many."""
    tasks = [task + "+" for task in label.split("+")]
    tasks[-1] = tasks[-1][:-1]
    cells = tasks if len(tasks) <= size else [label]
    return [*cells, *["="] * (size - len(cells))]


def _scaled_rows(report: Report, spans: Sequence[Span]) -> list[str]:
    several_stages = has_several_stages(report)
    scale = DRAWN_COLUMNS / (report.makespan or 1.0)
    rows: dict[str, list[str]] = {group.name: ["."] * DRAWN_COLUMNS for group in report.groups}
    for span in spans:
        first, last = round(span.start * scale), round(span.end * scale)
        label = span_label(span, several_stages=several_stages)
        rows[span.group][first:last] = label[: last - first].ljust(last - first, "=")
    return ["".join(row) for row in rows.values()]
