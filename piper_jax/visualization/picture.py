"""The timeline as a picture (SVG or PNG) by matplotlib: rows of tasks, and the peak memory of each group."""

from __future__ import annotations

import io
from collections import defaultdict
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from piper_jax.errors import ConfigError
from piper_jax.simulation.report import Report
from piper_jax.visualization.labels import bytes_text, row_names, time_text
from piper_jax.visualization.scene import COLORS, MEMORY_COLORS, Box, Lane, Scene, scene_of, shaded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TALL, THIN, GAP = 1.0, 0.28, 0.3  # heights of lanes and the space between groups, in rows
INK, MUTED, IDLE = "#1f2933", "#66727f", "#eef1f4"
MAX_TITLE = 60
TASK_COLORS = ("F", "B", "BI", "BW", "U")
MAX_LABELS = 4000
WIDTH_INCHES = 12.0


def save_picture(report: Report, path: Path) -> None:
    """Writes the timeline to ``path``, whose suffix (``.svg``, ``.png``, ``.pdf``) names the format."""
    figure = timeline_figure(report)
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def png_bytes(report: Report) -> bytes:
    """The timeline as a PNG file in memory."""
    stream = io.BytesIO()
    timeline_figure(report).savefig(stream, format="png", dpi=144)
    return stream.getvalue()


def timeline_figure(report: Report) -> Figure:
    """The matplotlib figure: a row of lanes for each group, peak memory by kind on the right where sizes are known."""
    scene = scene_of(report)
    tops, height = _lane_tops(scene.lanes)
    has_memory = report.peak_bytes > 0
    size = (WIDTH_INCHES, 1.25 + 0.30 * height * (1.0 if height < 40 else 40 / height))
    figure: Figure = figure_class()(figsize=size, facecolor="white")
    room = {"left": 0.045, "right": 0.985, "top": 1 - 0.72 / size[1], "bottom": 0.42 / size[1]}
    grid = figure.add_gridspec(
        1, 2 if has_memory else 1, width_ratios=(5, 1) if has_memory else None, wspace=0.03, **room
    )
    axes = figure.add_subplot(grid[0, 0])
    _draw_lanes(axes, report, scene, tops)
    _draw_boxes(axes, report, scene, tops, size[0] * 72 * (0.78 if has_memory else 0.94))
    axes.set_xlim(0, report.makespan or 1)
    axes.set_ylim(height, -0.1)
    _draw_time_axis(axes, report)
    if has_memory:
        _draw_memory(figure.add_subplot(grid[0, 1]), report, scene, tops, height)
    _draw_heading(figure, report, scene, size)
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
    return tops, position


def _draw_lanes(axes: Axes, report: Report, scene: Scene, tops: list[float]) -> None:
    names = dict(zip((group.name for group in report.groups), row_names([g.name for g in report.groups]), strict=True))
    step = 1 + len(report.groups) // 40
    for number, group in enumerate(report.groups):
        lanes = [index for index, lane in enumerate(scene.lanes) if lane.group == group.name]
        if number % step == 0:
            axes.text(-0.006, tops[lanes[0]] + TALL / 2, names[group.name], transform=axes.get_yaxis_transform(),
                      ha="right", va="center", fontsize=9, color=INK, fontweight="bold")  # fmt: skip
    for lane, top in zip(scene.lanes, tops, strict=True):
        axes.axhspan(top, top + _lane_height(lane), color=IDLE if lane.is_compute else "#f7f8fa", linewidth=0, zorder=0)


def _draw_boxes(axes: Axes, report: Report, scene: Scene, tops: list[float], points: float) -> None:
    from matplotlib.collections import PolyCollection

    polygons: dict[tuple[str, int], list[list[tuple[float, float]]]] = defaultdict(list)
    unit = points / (report.makespan or 1)
    labelled: list[tuple[Box, float, float]] = []
    for box in scene.boxes:
        height = _lane_height(scene.lanes[box.lane]) / box.num_parts
        top = tops[box.lane] + box.part * height
        corners = [(box.start, top), (box.end, top), (box.end, top + height), (box.start, top + height)]
        polygons[box.color, box.shade].append(corners)
        if scene.lanes[box.lane].is_compute and (box.end - box.start) * unit > 6:
            labelled.append((box, top + height / 2, height))
    for (color, shade), corners in polygons.items():
        face = shaded(COLORS[color], shade)
        outline = "white" if color in TASK_COLORS else face
        edge = (0.6 if len(scene.boxes) < 3000 else 0.15) if color in TASK_COLORS else 0.4
        axes.add_collection(PolyCollection(corners, facecolors=face, edgecolors=outline, linewidths=edge, zorder=2))
    for box, middle, height in labelled if len(labelled) <= MAX_LABELS else ():
        _draw_label(axes, box, middle, height, (box.end - box.start) * unit)


def _draw_label(axes: Axes, box: Box, middle: float, height: float, width: float) -> None:
    size = 7.5 if height > 0.6 else 6
    digits = box.label.lstrip("0123456789").lstrip("FBIWU")
    text = next((text for text in (box.label, digits) if len(text) * size * 0.7 < width), "")
    light = box.shade > 0 or box.color == "BW"
    axes.text((box.start + box.end) / 2, middle, text, ha="center", va="center_baseline", fontsize=size,
              color=INK if light else "white", zorder=3, clip_on=True)  # fmt: skip


def _draw_time_axis(axes: Axes, report: Report) -> None:
    axes.set_yticks([])
    axes.tick_params(axis="x", labelsize=8, colors=MUTED, length=3)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c3cad2")
    ticks = [tick for tick in axes.get_xticks() if 0 <= tick <= report.makespan]
    axes.set_xticks(ticks, [time_text(tick, report.time_unit) for tick in ticks])


def _draw_memory(axes: Axes, report: Report, scene: Scene, tops: list[float], height: float) -> None:
    """Peak bytes of one device of each group, stacked by kind, aligned with its compute lane."""
    largest = report.peak_bytes
    for group in report.groups:
        top = tops[next(number for number, lane in enumerate(scene.lanes) if lane.group == group.name)]
        left = 0
        peak = group.memory.peak
        for kind in MEMORY_COLORS:
            nbytes = getattr(peak, kind)
            axes.barh(top + TALL / 2, nbytes, 0.72, left=left, color=MEMORY_COLORS[kind], linewidth=0)
            left += nbytes
        if len(report.groups) <= 40:
            axes.text(left + largest * 0.02, top + TALL / 2, bytes_text(left), va="center", fontsize=7, color=MUTED)
    axes.set_xlim(0, largest * 1.45)
    axes.set_ylim(height, -0.1)
    axes.axis("off")


def _draw_heading(figure: Figure, report: Report, scene: Scene, size: tuple[float, float]) -> None:
    line = 1 / size[1]
    facts = (
        f"{report.num_stages} stages",
        f"{report.num_microbatches} microbatches",
        report.costs,
        f"makespan {time_text(report.makespan, report.time_unit)}",
        f"bubble {report.bubble:.1%}",
    )
    figure.text(
        0.02,
        1 - 0.26 * line,
        shorten(report.title or "step", MAX_TITLE, placeholder=" ..."),
        fontsize=13,
        fontweight="bold",
        color=INK,
        va="center",
    )
    figure.text(0.02, 1 - 0.52 * line, "   ".join(facts), fontsize=8.5, color=MUTED, va="center")
    used = {box.color for box in scene.boxes}
    _draw_legend(figure, {key: color for key, color in COLORS.items() if key in used}, 1 - 0.26 * line)
    if report.peak_bytes:
        peaks = [group.memory.peak for group in report.groups]
        kinds = [kind for kind in MEMORY_COLORS if any(getattr(peak, kind) for peak in peaks)]
        _draw_legend(figure, {kind: MEMORY_COLORS[kind] for kind in kinds}, 1 - 0.52 * line)


def _draw_legend(figure: Figure, colors: dict[str, str], middle: float) -> None:
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in colors.items()], ncols=len(colors), fontsize=8,
        loc="center right", bbox_to_anchor=(0.99, middle), frameon=False, labelcolor=MUTED,
        handlelength=0.9, handleheight=0.9, handletextpad=0.45, columnspacing=1.1,
    )  # fmt: skip
