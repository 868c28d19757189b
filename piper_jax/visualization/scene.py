"""What every picture of a report shows: lanes, boxes and bands, before any drawing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from piper_jax.ir.ids import NodeId
from piper_jax.simulation.report import Report, Span
from piper_jax.visualization.bands import Band, Shades, joined, runs
from piper_jax.visualization.labels import has_several_stages, span_label, task_label

COMPUTING = ("compute", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One stream of one group; ``is_compute`` lanes are drawn tall."""

    group: str
    stream: str
    is_compute: bool


class Box(NamedTuple):
    """One task on a lane.

    Attributes:
      lane, span: numbers of the lane and of the span in the report's timeline.
      task: a node of the task.
      part, num_parts: which horizontal stripe of its span it is; several tasks share an overlap slot.
      color: a key of ``COLORS``.  shade: 0 for the first stage of the group, 1 for its next, ...
    """

    lane: int
    span: int
    task: NodeId
    start: float
    end: float
    part: int
    num_parts: int
    color: str
    shade: int
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Lanes from top to bottom, the boxes on them, and bands in place of boxes below ``narrow`` in time."""

    lanes: tuple[Lane, ...]
    boxes: tuple[Box, ...]
    bands: tuple[Band, ...] = ()
    narrow: float = 0.0

    def looks(self) -> set[tuple[str, int]]:
        """Every color and shade that occurs; what a legend explains."""
        found = {(box.color, box.shade) for box in self.boxes}
        return found.union(*(band.times for band in self.bands))

    def labelled(self) -> list[Box]:
        """Boxes on which something can be written."""
        return [
            box for box in self.boxes if self.lanes[box.lane].is_compute and box.end - box.start > 2.5 * self.narrow
        ]


def scene_of(report: Report, *, narrow: float = 0.0) -> Scene:
    """Lays out the timeline of ``report``: the compute streams of each group, then its communication.

    Args:
      narrow: the time below which neighbouring spans become bands; 0 keeps every span a box.
    """
    spans: dict[tuple[str, str], list[int]] = defaultdict(list)
    computing: set[tuple[str, str]] = set()
    for number, span in enumerate(report.timeline):
        spans[span.group, span.stream].append(number)
        if span.kind in COMPUTING:
            computing.add((span.group, span.stream))
    order = {group.name: place for place, group in enumerate(report.groups)}
    computing |= {(name, "compute") for name in order}
    places = sorted(
        computing | spans.keys(), key=lambda key: (order[key[0]], key not in computing, key[1] != "compute", key[1])
    )
    lanes = tuple(Lane(group=key[0], stream=key[1], is_compute=key in computing) for key in places)
    shades = {group.name: {stage: n for n, stage in enumerate(group.stages)} for group in report.groups}
    several_stages = has_several_stages(report)
    boxes: list[Box] = []
    bands: list[Band] = []
    for lane, key in enumerate(places):
        numbers = spans.get(key, [])
        merged: list[Band] = []
        for run in _runs(report, numbers, narrow):
            if len(run) > 1:
                merged.append(_band(report, run, lane, shades[key[0]]))
            else:
                boxes += _boxes(report.timeline[run[0]], run[0], lane, shades[key[0]], several_stages)
        bands += joined(merged, narrow)
    boxes.sort(key=lambda box: (box.span, box.part))
    return Scene(lanes=lanes, boxes=tuple(boxes), bands=tuple(bands), narrow=narrow)


def _runs(report: Report, numbers: Sequence[int], narrow: float) -> list[Sequence[int]]:
    if not narrow:
        return [(number,) for number in numbers]
    spans = [report.timeline[number] for number in numbers]
    times = [(span.start, span.end) for span in spans]
    return [numbers[run.start : run.stop] for run in runs(times, narrow)]


def _band(report: Report, run: Sequence[int], lane: int, shades: dict[int, int]) -> Band:
    times: Shades = {}
    timeline = report.timeline
    for number in run:
        _, _, kind, nodes, start, end, *_ = timeline[number]
        looks = _looks(nodes, shades) if kind in COMPUTING else ((kind, 0),)
        for look in looks:
            times[look] = times.get(look, 0.0) + (end - start) / len(looks)
    return Band(lane, report.timeline[run[0]].start, report.timeline[run[-1]].end, times)


def _looks(nodes: Sequence[NodeId], shades: dict[int, int]) -> Sequence[tuple[str, int]]:
    """The color and the shade of each task of a computing span."""
    if len(nodes) == 1:
        return (_look(nodes[0].PASS, nodes[0].PP, shades),)
    tasks = {(node.PASS, node.PP, node.MB): None for node in nodes}
    return [_look(PASS, stage, shades) for PASS, stage, _ in tasks]


def _look(PASS: str | None, stage: int | None, shades: dict[int, int]) -> tuple[str, int]:
    return PASS or "U", shades.get(stage, 0) if stage is not None else 0


def _boxes(span: Span, number: int, lane: int, shades: dict[int, int], several_stages: bool) -> list[Box]:
    """The tasks of an overlap slot on top of each other; joined slots side by side, with equal shares of the time."""
    if span.kind not in COMPUTING:
        label = span_label(span, several_stages=several_stages)
        return [Box(lane, number, span.nodes[0], span.start, span.end, 0, 1, span.kind, 0, label)]
    counts = span.joined or (len(span.nodes),)
    firsts = [0, *accumulate(counts)]
    share = (span.end - span.start) / len(counts)
    found: list[Box] = []
    for place, (first, last) in enumerate(pairwise(firsts)):
        tasks: dict[tuple[str | None, int | None, int | None], list[NodeId]] = defaultdict(list)
        for node in span.nodes[first:last]:
            tasks[node.PASS, node.PP, node.MB].append(node)
        start = span.start + place * share
        end = start + share if place + 1 < len(counts) else span.end
        found += [
            Box(
                lane, number, nodes[0], start, end, part, len(tasks), *_look(PASS, stage, shades),
                task_label(nodes, several_stages=several_stages),
            )
            for part, ((PASS, stage, _), nodes) in enumerate(tasks.items())
        ]  # fmt: skip
    return found
