"""The timeline as a picture (SVG, PNG, PDF) by matplotlib: rows of tasks, and the peak memory of each group."""

from __future__ import annotations

import io
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper_jax.errors import ConfigError
from piper_jax.ir.columns import bytes_text
from piper_jax.simulation.report import Report
from piper_jax.visualization.labels import group_lines, time_text, written
from piper_jax.visualization.legend import draw_heading, heading_inches
from piper_jax.visualization.palette import (
    COLORS,
    IDLE,
    INK,
    MEMORY_COLORS,
    MUTED,
    PASS_COLORS,
    THIN_IDLE,
    ink_on,
    shaded,
)
from piper_jax.visualization.scene import Box, Lane, Scene, scene_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TALL, THIN, GAP = 1.0, 0.28, 0.3  # heights of lanes and the space between groups, in rows
LOW = 0.55  # height of communication on a computing lane
WIDTH, MEMORY, LEFT, RIGHT, BOTTOM = 12.0, 1.9, 0.72, 0.16, 0.34  # inches
ROW, MAX_ROWS = 0.34, 7.5  # inches of a row, and of all rows
NARROW = 2.4  # points below which spans become bands
MAX_LABELS = 4000
Corners = list[tuple[float, float]]


def save_picture(report: Report, path: Path) -> None:
    """Writes the timeline to ``path``, whose suffix (``.svg``, ``.png``, ``.pdf``) names the format."""
    save_figure(timeline_figure(report), path)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure; equal figures give equal SVG files."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "piper"}):
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def png_bytes(report: Report) -> bytes:
    """The timeline as a PNG file in memory."""
    stream = io.BytesIO()
    timeline_figure(report).savefig(stream, format="png", dpi=144)
    return stream.getvalue()


def timeline_figure(report: Report) -> Figure:
    """The matplotlib figure: a row of lanes for each group, peak memory by kind on the right where sizes are known."""
    room = WIDTH - LEFT - RIGHT - (MEMORY if report.peak_bytes else 0)
    point = (report.makespan or 1) / (room * 72)
    scene = scene_of(report, narrow=NARROW * point)
    tops, height = _lane_tops(scene.lanes)
    row = min(ROW, MAX_ROWS / height)
    tall = heading_inches(report, scene) + row * height + BOTTOM
    figure: Figure = figure_class()(figsize=(WIDTH, tall), facecolor="white")
    place = (LEFT / WIDTH, BOTTOM / tall, room / WIDTH, row * height / tall)
    axes = figure.add_axes(place)
    axes.set_xlim(0, report.makespan or 1)
    axes.set_ylim(height, -0.05)
    _draw_lanes(axes, report, scene, tops, row)
    _draw_areas(axes, scene, tops, point)
    _draw_labels(axes, scene, tops, point, row)
    _draw_time_axis(axes, report)
    if report.peak_bytes:
        beside = figure.add_axes(
            ((LEFT + room + 0.12) / WIDTH, place[1], (MEMORY - 0.12) / WIDTH, place[3]), sharey=axes
        )
        _draw_memory(beside, report, scene, tops)
    draw_heading(figure, report, scene, (WIDTH, tall))
    return figure


def figure_class() -> Any:
    """matplotlib's Figure; drawing needs no display and no pyplot."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "pictures need matplotlib.", help="pip install matplotlib, or draw to .html instead."
        ) from None
    return Figure


def _lane_height(lane: Lane) -> float:
    return TALL if lane.is_compute else THIN


def _lane_tops(lanes: tuple[Lane, ...]) -> tuple[list[float], float]:
    """The upper edge of each lane, and the height of all."""
    tops: list[float] = []
    position = 0.0
    for number, lane in enumerate(lanes):
        if number and lanes[number - 1].group != lane.group:
            position += GAP
        tops.append(position)
        position += _lane_height(lane)
    return tops, max(position, TALL)


def _draw_lanes(axes: Axes, report: Report, scene: Scene, tops: list[float], row: float) -> None:
    from matplotlib.collections import PolyCollection

    for color, is_compute in ((IDLE, True), (THIN_IDLE, False)):
        rows = [
            _corners(0, report.makespan or 1, top, _lane_height(lane))
            for lane, top in zip(scene.lanes, tops, strict=True)
            if lane.is_compute is is_compute
        ]
        axes.add_collection(PolyCollection(rows, facecolors=color, linewidths=0, zorder=0))
    firsts = {lane.group: top for lane, top in reversed(list(zip(scene.lanes, tops, strict=True)))}
    step = 1 + int(0.12 / (row * (TALL + GAP)))
    for group in report.groups[::step]:
        lines = group_lines(group) if row > 0.24 else group_lines(group)[:1]
        for line, shift in zip(lines, (0.32, 0.72) if len(lines) > 1 else (0.5,), strict=True):
            bold = line == group.name
            axes.text(
                -0.06 / WIDTH, firsts[group.name] + shift * TALL, line, transform=axes.get_yaxis_transform(),
                ha="right", va="center", fontsize=min(9, 62 * row) if bold else 6.5, color=INK if bold else MUTED,
                fontweight="bold" if bold else "normal",
            )  # fmt: skip


def _draw_areas(axes: Axes, scene: Scene, tops: list[float], point: float) -> None:
    """All boxes and bands of one color and shade at once."""
    from matplotlib.collections import PolyCollection

    areas: dict[tuple[str, int], list[Corners]] = defaultdict(list)
    for box in scene.boxes:
        top, height = _place(box, scene, tops)
        length = box.end - box.start
        gap = min(0.7 * point, 0.12 * length)
        areas[box.color, box.shade].append(_corners(box.start, length - gap, top, height))
    for band in scene.bands:
        height = _lane_height(scene.lanes[band.lane])
        for color, shade, low, high in band.strips():
            top = tops[band.lane] + (1 - high) * height
            areas[color, shade].append(_corners(band.start, band.end - band.start, top, (high - low) * height))
    for (color, shade), corners in areas.items():
        face = shaded(COLORS[color], shade)
        axes.add_collection(PolyCollection(corners, facecolors=face, linewidths=0, zorder=2))


def _place(box: Box, scene: Scene, tops: list[float]) -> tuple[float, float]:
    """The upper edge and the height of a box."""
    lane = scene.lanes[box.lane]
    height = _lane_height(lane) / box.num_parts
    if lane.is_compute and box.color not in PASS_COLORS:
        return tops[box.lane] + (1 - LOW) * height, LOW * height
    return tops[box.lane] + box.part * height, height - (0.04 if box.part + 1 < box.num_parts else 0)


def _corners(left: float, length: float, top: float, height: float) -> Corners:
    return [(left, top), (left + length, top), (left + length, top + height), (left, top + height)]


def _draw_labels(axes: Axes, scene: Scene, tops: list[float], point: float, row: float) -> None:
    labelled = scene.labelled()
    for box in labelled if len(labelled) <= MAX_LABELS else ():
        top, height = _place(box, scene, tops)
        size = 7.5 if height * row > 0.2 else 6
        tall = int(height * row * 72 / (size * 1.3))
        text = written(box.label, (box.end - box.start) / point / (0.66 * size), tall)
        axes.text(
            (box.start + box.end) / 2, top + height / 2, text, ha="center", va="center_baseline" if "\n" not in text
            else "center", fontsize=size, linespacing=1.0, color=ink_on(shaded(COLORS[box.color], box.shade)),
            zorder=3, clip_on=True,
        )  # fmt: skip


def _draw_time_axis(axes: Axes, report: Report) -> None:
    axes.set_yticks([])
    axes.tick_params(axis="x", labelsize=8, colors=MUTED, length=3)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c3cad2")
    ticks = [tick for tick in axes.get_xticks() if 0 <= tick <= report.makespan]
    axes.set_xticks(ticks, [time_text(tick, report.time_unit, like=report.makespan) for tick in ticks])


def _draw_memory(axes: Axes, report: Report, scene: Scene, tops: list[float]) -> None:
    """Peak bytes of one device of each group, stacked by kind, aligned with its compute lane."""
    from matplotlib.collections import PolyCollection

    firsts = {lane.group: top for lane, top in reversed(list(zip(scene.lanes, tops, strict=True)))}
    peaks = [group.memory.peak for group in report.groups]
    middles = [firsts[group.name] + TALL / 2 for group in report.groups]
    lefts = [0] * len(peaks)
    for kind, color in MEMORY_COLORS.items():
        rights = [left + getattr(peak, kind) for left, peak in zip(lefts, peaks, strict=True)]
        bars = [
            _corners(left, right - left, middle - 0.36, 0.72)
            for left, right, middle in zip(lefts, rights, middles, strict=True)
        ]
        axes.add_collection(PolyCollection(bars, facecolors=color, linewidths=0))
        lefts = rights
    largest = max(lefts)
    for left, middle in zip(lefts, middles, strict=True) if len(peaks) <= 40 else ():
        axes.text(left + largest * 0.03, middle, bytes_text(left), va="center", fontsize=7, color=MUTED)
    axes.set_xlim(0, largest * (1.55 if len(peaks) <= 40 else 1.05))
    axes.axis("off")
