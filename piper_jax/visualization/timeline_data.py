"""What the page of a timeline draws, as plain data: tables of strings, and boxes as columns of numbers."""

from __future__ import annotations

from typing import Any

from piper_jax.errors import counted
from piper_jax.ir.columns import bytes_text
from piper_jax.ir.ids import NodeId
from piper_jax.simulation.report import GroupReport, Report
from piper_jax.visualization.labels import has_several_stages, joined_notes, label_note, time_text
from piper_jax.visualization.palette import MEMORY_COLORS
from piper_jax.visualization.scene import Box, Scene, scene_of

COLUMNS = (
    "lane", "start", "end", "part", "parts", "color", "shade", "label",
    "op", "pass", "pp", "ep", "mb", "blocked", "bytes", "critical",
)  # fmt: skip


def timeline_data(report: Report, measured: Report | None = None) -> dict[str, Any]:
    """The data of the page, ready for JSON.

    Args:
      measured: the same step as it ran; its computations are shown below the planned ones of each group. Planned times
        in ticks are stretched to its makespan.

    Coordinates that do not apply are -1; ``more`` gives the further ops of boxes that have several.
    """
    stretch = measured.makespan / report.makespan if measured and report.time_unit != measured.time_unit else 1.0
    planned = scene_of(report)
    lanes = [_lane(report, planned, number, is_measured=False) for number in range(len(planned.lanes))]
    tables = _Tables()
    tables.add(report, planned, {number: number for number in range(len(lanes))}, stretch)
    if measured is not None:
        tables.add(measured, *_measured_lanes(report, measured, lanes), 1.0)
    order = sorted(range(len(lanes)), key=lambda n: (lanes[n]["group"], not lanes[n]["compute"], lanes[n]["measured"]))
    places = {number: place for place, number in enumerate(order)}
    tables.columns["lane"] = [places[number] for number in tables.columns["lane"]]
    used = [kind for kind in MEMORY_COLORS if any(getattr(g.memory.peak_of_kind(kind), kind) for g in report.groups)]
    return {
        "title": report.title or "step",
        "subtitle": _subtitle(report),
        "facts": _facts(report, measured),
        "note": "; ".join([label_note(has_several_stages(report)), *joined_notes(measured or report)]),
        "unit": (measured or report).time_unit,
        "end": max(report.makespan * stretch, measured.makespan if measured else 0.0) or 1.0,
        "peak": report.peak_bytes,
        "groups": [_group(group, used, stretch) for group in report.groups],
        "lanes": [lanes[number] for number in order],
        "boxes": {name: _column(values) for name, values in tables.columns.items()},
        "more": tables.more,
        "labels": list(tables.labels),
        "ops": list(tables.ops),
        "passes": list(tables.passes),
        "kinds": list(tables.kinds),
        "memoryKinds": used,
        "memoryColors": MEMORY_COLORS,
        "sources": dict(report.sources),
    }


class _Tables:
    """Boxes as columns, with strings replaced by their numbers. Lives inside one call."""

    def __init__(self):
        self.columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        self.more: dict[int, list[int]] = {}
        self.labels: dict[str, int] = {}
        self.ops: dict[str, int] = {}
        self.passes: dict[str, int] = {}
        self.kinds: dict[str, int] = {}

    def add(self, report: Report, scene: Scene, lanes: dict[int, int], stretch: float) -> None:
        """Appends the boxes on the given lanes of ``scene``, which maps their numbers to those of the page."""
        critical = set(report.critical_path)
        appends = [self.columns[name].append for name in COLUMNS]
        for box in scene.boxes:
            if box.lane in lanes:
                row = self._row(box, report, lanes[box.lane], stretch, critical)
                for append, value in zip(appends, row, strict=True):
                    append(value)

    def _row(self, box: Box, report: Report, lane: int, stretch: float, critical: set[Any]) -> tuple[Any, ...]:
        span = report.timeline[box.span]
        nodes = [node for node in span.nodes if _is_part(node, box) or (box.num_parts == 1 and not span.joined)]
        first = nodes[0]
        if len(nodes) > 1:
            self.more[len(self.columns["lane"])] = [_number(self.ops, node.op) for node in nodes[1:]]
        coordinates = (-1 if value is None else value for value in (first.PP, first.EP, first.MB))
        return (
            lane, _short(box.start * stretch), _short(box.end * stretch), box.part, box.num_parts,
            _number(self.kinds, box.color), box.shade, _number(self.labels, box.label), _number(self.ops, first.op),
            _number(self.passes, first.PASS or ""), *coordinates, _short(span.blocked * stretch), span.nbytes,
            int(span in critical),
        )  # fmt: skip


def _is_part(node: NodeId, box: Box) -> bool:
    return node.PASS == box.task.PASS and node.PP == box.task.PP and node.MB == box.task.MB


def _number(table: dict[str, int], text: str) -> int:
    return table.setdefault(text, len(table))


def _short(time: float) -> float:
    return float(f"{time:.8g}")


def _column(values: list[Any]) -> Any:
    """A column, or the one value that all of it has."""
    return values if len(set(values[:2])) > 1 or len(set(values)) != 1 else {"all": values[0], "size": len(values)}


def _lane(report: Report, scene: Scene, number: int, *, is_measured: bool) -> dict[str, Any]:
    lane = scene.lanes[number]
    group = [found.name for found in report.groups].index(lane.group)
    return {"group": group, "stream": lane.stream, "compute": lane.is_compute, "measured": is_measured}


def _measured_lanes(report: Report, measured: Report, lanes: list[dict[str, Any]]) -> tuple[Scene, dict[int, int]]:
    """Adds the computing lanes of ``measured`` to ``lanes``; gives its scene, and their numbers."""
    scene = scene_of(measured)
    names = {group.name for group in report.groups}
    numbers: dict[int, int] = {}
    for number, lane in enumerate(scene.lanes):
        if lane.is_compute and lane.group in names:
            numbers[number] = len(lanes)
            lanes.append(_lane(report, scene, number, is_measured=True))
    return scene, numbers


def _subtitle(report: Report) -> str:
    devices = sum(len(group.devices) for group in report.groups)
    counts = {"stage": report.num_stages, "microbatch": report.num_microbatches, "device group": len(report.groups)}
    listed = ", ".join(counted(count, noun) for noun, count in counts.items())
    return f"{listed} with {counted(devices, 'device')} in all. Costs: {report.costs}."


def _facts(report: Report, measured: Report | None) -> list[tuple[str, str, str]]:
    """Name, value and measured value of the headline numbers."""
    found = [("makespan", *(time_text(r.makespan, r.time_unit) for r in (report, measured) if r))]
    found.append(("bubble", *(f"{r.bubble:.1%}" for r in (report, measured) if r)))
    facts = [(name, value, f"measured {rest[0]}" if rest else "") for name, value, *rest in found]
    peak = max(report.groups, key=lambda group: group.memory.peak_bytes, default=None)
    if peak is not None and peak.memory.peak_bytes:
        facts.append((f"peak memory, on {peak.name}", bytes_text(peak.memory.peak_bytes), _of(report.device_bytes)))
    return facts


def _of(device_bytes: int | None) -> str:
    return "" if device_bytes is None else f"of {bytes_text(device_bytes)}"


def _group(group: GroupReport, kinds: list[str], stretch: float) -> dict[str, Any]:
    steps, peak = group.memory.steps, group.memory.peak
    return {
        "name": group.name,
        "devices": list(group.devices),
        "stages": list(group.stages),
        "bubble": group.bubble,
        "busy": dict(group.busy),
        "peak": peak.total_bytes,
        "peakTime": peak.time * stretch,
        "memory": {
            "time": [_short(step.time * stretch) for step in steps],
            "bytes": [_column([getattr(step, kind) for step in steps]) for kind in kinds],
        },
    }
