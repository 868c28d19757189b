"""A report as a small table: what ``print(report)`` shows."""

from __future__ import annotations

from piper_jax.errors import counted
from piper_jax.ir.columns import bytes_text
from piper_jax.simulation.report import MEMORY_KINDS, GroupReport, Report
from piper_jax.visualization.grid import heading_text
from piper_jax.visualization.labels import time_text

MAX_ROWS = 24
PASSING = ("activations", "transfers", "batch")
GROWN = {"parameters": "gathered parameters", "optimizer": "gathered optimizer state"}


def summary_text(report: Report) -> str:
    """The heading, then for each group devices, bubble, busy time by stream and memory; last the largest peak."""
    header, *rows = report_table(report)
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    shown = (
        lines
        if len(rows) <= MAX_ROWS
        else [*lines[: 1 + MAX_ROWS], f"... {counted(len(rows) - MAX_ROWS, 'more group')}"]
    )
    return "\n".join([heading_text(report), *shown, *rest_lines(report)])


def rest_lines(report: Report) -> list[str]:
    """What is said below the table: the largest peak, notes, and whether memory does not fit."""
    return [*_largest_peak(report), *_notes(report), *_shortage(report)]


def _largest_peak(report: Report) -> list[str]:
    """A line that says where the largest peak is, what runs then, and what has come to what is held between steps."""
    group = max(report.groups, key=lambda group: group.memory.peak_bytes, default=None)
    if group is None or not group.memory.peak_bytes:
        return []
    peak, rest = group.memory.peak, group.memory.steps[0]
    running = [s for s in report.timeline if s.group == group.name and s.start <= peak.time < s.end]
    during = next((f" during {s.nodes[0]}" for s in running if s.kind == "compute"), "")
    kept = {kind: 0 if kind in PASSING else getattr(rest, kind) for kind in MEMORY_KINDS}  # what runs at 0 has begun
    added = [(getattr(peak, kind) - kept[kind], kind) for kind in MEMORY_KINDS]
    grown = [f"{bytes_text(n)} {GROWN.get(kind, kind)}" for n, kind in sorted(added, reverse=True) if n > 0]
    between = f"{bytes_text(sum(kept.values()))} between steps"
    return [f"peak on {group.name}{during}: " + " + ".join([between, *grown])]


def _notes(report: Report) -> list[str]:
    notes = report.notes
    return list(notes) if len(notes) <= MAX_ROWS else [*notes[:MAX_ROWS], f"  ... {len(notes) - MAX_ROWS} more"]


def _shortage(report: Report) -> list[str]:
    """A line that says so if a device has less memory than a group needs."""
    if report.device_bytes is None or report.needed_bytes <= report.device_bytes:
        return []
    short = [group for group in report.groups if group.memory.needed_bytes > report.device_bytes]
    names = ", ".join(group.name for group in short[:8]) + (", ..." if len(short) > 8 else "")
    needed, given = bytes_text(report.needed_bytes), bytes_text(report.device_bytes)
    return [f"does not fit: a device has {given}; {names} need up to {needed}"]


def report_table(report: Report) -> list[list[str]]:
    """A header, and a row for each group: devices, bubble, busy time by stream, memory at its peak."""
    streams = list(dict.fromkeys(stream for group in report.groups for stream in group.busy))
    peaks = [group.memory.peak for group in report.groups]
    kinds = [kind for kind in MEMORY_KINDS if any(getattr(peak, kind) for peak in peaks)]
    memory = ["peak", "at", *kinds] if kinds else []
    header = ["group", "devices", "stages", "bubble", *(f"{stream} busy" for stream in streams), *memory]
    return [header, *(_row(report, group, streams, kinds) for group in report.groups)]


def _row(report: Report, group: GroupReport, streams: list[str], kinds: list[str]) -> list[str]:
    peak = group.memory.peak
    memory = [bytes_text(peak.total_bytes), time_text(peak.time, report.time_unit)] if kinds else []
    return [
        group.name,
        _ranges(group.devices),
        ",".join(map(str, group.stages)),
        f"{group.bubble:.3f}",
        *(time_text(group.busy.get(stream, 0.0), report.time_unit) for stream in streams),
        *memory,
        *(bytes_text(getattr(peak, kind)) for kind in kinds),
    ]


def _ranges(numbers: tuple[int, ...]) -> str:
    """``0-3``, or the number of devices where they are not consecutive."""
    if len(numbers) == 1:
        return str(numbers[0])
    consecutive = numbers and numbers == tuple(range(numbers[0], numbers[0] + len(numbers)))
    return f"{numbers[0]}-{numbers[-1]}" if consecutive else f"{len(numbers)} devices"
