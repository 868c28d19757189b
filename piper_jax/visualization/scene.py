"""What every picture of a report shows: lanes and boxes, before any drawing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from piper_jax.ir.ids import NodeId
from piper_jax.planning.display import PASS_COLORS
from piper_jax.simulation.report import Report, Span
from piper_jax.visualization.labels import has_several_stages, span_label, task_label

# Passes, then communication; distinct in lightness too, for grey prints and colour-blind readers.
COLORS = {
    **PASS_COLORS,
    "send": "#8d99a6",
    "recv": "#bcc5ce",
    "all_reduce": "#cf4a4a",
    "reduce_scatter": "#e2725b",
    "all_gather": "#ee9440",
    "all_to_all": "#b8579c",
}
MEMORY_COLORS = {
    "parameters": "#56657a",
    "optimizer": "#9a7b4f",
    "gradients": "#b5566f",
    "activations": "#58a4bd",
    "transfers": "#b9a3c9",
}


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
    """Lanes from top to bottom, and the boxes on them."""

    lanes: tuple[Lane, ...]
    boxes: tuple[Box, ...]


def scene_of(report: Report) -> Scene:
    """Lays out the timeline of ``report``: the compute streams of each group, then its communication."""
    streams: dict[str, dict[str, bool]] = {group.name: {"compute": True} for group in report.groups}
    for span in report.timeline:
        is_compute = span.kind in ("compute", "update")
        streams[span.group][span.stream] = streams[span.group].get(span.stream, False) or is_compute
    lanes = tuple(
        Lane(group=group, stream=stream, is_compute=is_compute)
        for group, found in streams.items()
        for stream, is_compute in sorted(found.items(), key=lambda item: (not item[1], item[0] != "compute", item[0]))
    )
    numbers = {(lane.group, lane.stream): number for number, lane in enumerate(lanes)}
    shades = {group.name: {stage: n for n, stage in enumerate(group.stages)} for group in report.groups}
    several_stages = has_several_stages(report)
    boxes = [
        box
        for number, span in enumerate(report.timeline)
        for box in _boxes(span, number, numbers[span.group, span.stream], shades[span.group], several_stages)
    ]
    return Scene(lanes=lanes, boxes=tuple(boxes))


def _boxes(span: Span, number: int, lane: int, shades: dict[int, int], several_stages: bool) -> list[Box]:
    if span.kind not in ("compute", "update"):
        label = span_label(span, several_stages=several_stages)
        return [Box(lane, number, span.nodes[0], span.start, span.end, 0, 1, span.kind, 0, label)]
    tasks: dict[tuple[str | None, int | None, int | None], list[NodeId]] = defaultdict(list)
    for node in span.nodes:
        tasks[node.PASS, node.PP, node.MB].append(node)
    return [
        Box(
            lane, number, nodes[0], span.start, span.end, part, len(tasks), PASS or "U",
            shades.get(stage, 0) if stage is not None else 0, task_label(nodes, several_stages=several_stages),
        )
        for part, ((PASS, stage, _), nodes) in enumerate(tasks.items())
    ]  # fmt: skip


def shaded(color: str, shade: int) -> str:
    """``color`` (``#rrggbb``), mixed with white by a third for each ``shade``."""
    keep = (2 / 3) ** shade
    channels = (int(color[position : position + 2], 16) for position in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - channel) * keep):02x}" for channel in channels)
