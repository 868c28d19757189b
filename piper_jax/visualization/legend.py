"""The heading of a picture: what it shows, and a legend of every colour and shade in it."""

from __future__ import annotations

from textwrap import shorten
from typing import TYPE_CHECKING

from piper_jax.errors import counted
from piper_jax.simulation.report import Report
from piper_jax.visualization.labels import has_several_stages, joined_notes, label_note, time_text
from piper_jax.visualization.palette import COLORS, INK, MAX_SHADE, MEMORY_COLORS, MUTED, ORDINALS, meaning, shaded
from piper_jax.visualization.scene import Scene

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE, LINE, BELOW = 0.24, 0.25, 0.12  # inches: middle of the title, a line of the legend, the room below
LETTER, SWATCH, GAP = 0.061, 0.33, 0.17  # inches of a letter, of a swatch with its gaps, between entries
LEFT, SPACE = 0.18, 11.7  # inches: where the heading begins, and what a line has room for
MAX_TITLE = 60
WORDS = "none"  # the colour of an entry that is words alone
Entries = dict[str, str]


def heading_inches(report: Report, scene: Scene) -> float:
    """How tall the heading is."""
    return TITLE + 0.18 + LINE * len(legend_lines(report, scene)) + BELOW


def draw_heading(figure: Figure, report: Report, scene: Scene, size: tuple[float, float]) -> None:
    """Title and figures of merit, then the legend; ``size`` of the figure in inches."""
    facts = (
        f"{counted(report.num_stages, 'stage')}",
        f"{counted(report.num_microbatches, 'microbatch')}",
        report.costs,
        f"makespan {time_text(report.makespan, report.time_unit)}",
        f"bubble {report.bubble:.1%}",
    )
    title = shorten(report.title or "step", MAX_TITLE, placeholder=" ...")
    left, right, y = LEFT / size[0], 1 - LEFT / size[0], 1 - TITLE / size[1]
    figure.text(left, y, title, fontsize=13, fontweight="bold", color=INK, va="center", parse_math=False)
    figure.text(right, y, "   ".join(facts), fontsize=8.5, va="center", ha="right", color=MUTED)
    for number, line in enumerate(legend_lines(report, scene)):
        _draw_line(figure, line, left, 1 - (TITLE + 0.3 + LINE * number) / size[1])


def legend_lines(report: Report, scene: Scene) -> list[Entries]:
    """Colours, shades and what labels say, and kinds of memory: as few lines as have room for them."""
    lines: list[Entries] = [{}]
    for part in (color_entries(scene), shade_entries(scene), note_entries(report, scene), memory_entries(report)):
        if _inches(lines[-1]) + _inches(part) > SPACE:
            lines.append({})
        lines[-1] |= part
    return lines


def color_entries(scene: Scene) -> Entries:
    """What each colour means, in the order of the palette."""
    used = {color for color, _ in scene.looks()}
    return {meaning(kind): color for kind, color in COLORS.items() if kind in used}


def shade_entries(scene: Scene) -> Entries:
    """What each paler shade means, of a pass that has it; nothing where every group holds one stage."""
    palest = max(scene.looks(), key=lambda look: (look[1], look[0] == "F"), default=("F", 0))
    most = min(palest[1], MAX_SHADE)
    last = f"{ORDINALS[most]} and later" if palest[1] > most else ORDINALS[most]
    names = [ORDINALS[n] for n in range(1, most)] + [f"{last} stage of its group"]
    return {name: shaded(COLORS[palest[0]], n) for n, name in enumerate(names, start=1)} if most else {}


def note_entries(report: Report, scene: Scene) -> Entries:
    """What is written on boxes, and how bands are read."""
    labels = [label_note(has_several_stages(report))] if scene.labelled() else []
    bands = ["where tasks are too narrow to see, heights are shares of time"] if scene.bands else []
    return dict.fromkeys(labels + joined_notes(report) + bands, WORDS)


def memory_entries(report: Report) -> Entries:
    """What each colour of the bars on the right means."""
    peaks = [group.memory.peak for group in report.groups]
    kinds = {kind: color for kind, color in MEMORY_COLORS.items() if any(getattr(peak, kind) for peak in peaks)}
    return {"peak memory of one device:": WORDS, **kinds} if kinds else {}


def _inches(entries: Entries) -> float:
    return sum(LETTER * len(name) + SWATCH for name in entries)


def _draw_line(figure: Figure, entries: Entries, left: float, middle: float) -> None:
    """Swatches with words, or words alone."""
    from matplotlib.patches import Rectangle

    wide, tall = figure.get_size_inches()
    for name, color in entries.items():
        if color != WORDS:
            corner = (left, middle - 0.05 / tall)
            figure.add_artist(Rectangle(corner, 0.1 / wide, 0.1 / tall, facecolor=color, linewidth=0))
            left += 0.15 / wide
        text = figure.text(left, middle, name, fontsize=8, va="center_baseline", color=MUTED)
        left = text.get_window_extent().x1 / figure.bbox.width + GAP / wide
