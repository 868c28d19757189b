"""The graph as a picture (SVG, PNG, PDF) by matplotlib; the page of the graph is interactive, see ``web/graph.js``."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from piper_jax.errors import counted
from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import Filter
from piper_jax.ir.ids import NodeId
from piper_jax.visualization.graph_data import color_of, has_several_stages, node_lines, short_label
from piper_jax.visualization.graph_layout import Edge, Layout, layout_of
from piper_jax.visualization.graph_routes import Grid, Point, Route, routes_of
from piper_jax.visualization.palette import COLORS, IDLE, INK, MUTED, ink_on, meaning
from piper_jax.visualization.picture import figure_class, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path as Curve

MAX_NODES = 600
MANY_COLUMNS = 10  # more columns than that have short labels only
TRANSFER, VALUE = "#c2572b", "#9aa5b1"
ROUND = 0.07  # inches: how round corners are
LEFT, TOP, MARGIN = 0.75, 0.62, 0.3  # inches; a margin above each band has room for bent edges
Box = tuple[float, float, float, float]


def save_graph(dag: Dag, path: Path, filter: Filter | None = None) -> None:
    """Writes the graph to ``path``: ``.svg``, ``.png`` or ``.pdf``."""
    save_figure(graph_figure(dag, filter), path)


def graph_figure(dag: Dag, filter: Filter | None = None) -> Figure:
    """The matplotlib figure of the graph; its units are inches."""
    layout = layout_of(dag, filter, max_nodes=MAX_NODES, instead=", or draw to .html")
    is_wide = layout.num_columns > MANY_COLUMNS
    texts = {node: _lines(dag, node, is_wide) for node in layout.places}
    widest = max((_wide(lines) for lines in texts.values()), default=0.0)
    wide = max(0.42 if is_wide else 0.9, widest + 0.14)
    grid = Grid(wide + (0.22 if is_wide else 0.6), 0.46 if is_wide else 0.72, wide, 0.3 if is_wide else 0.44)
    width = LEFT + grid.column * layout.num_columns + 0.1
    height = TOP + grid.row * layout.num_rows + MARGIN * len(layout.bands) + 0.1
    figure: Figure = figure_class()(figsize=(max(width, 5.5), height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.set_xlim(0, max(width, 5.5))
    axes.set_ylim(height, 0)
    _draw_bands(axes, layout, grid)
    places = {node: _place(layout, grid, node) for node in layout.places}
    routes = routes_of(layout, places, grid)
    for edge, route in zip(layout.edges, routes, strict=True):
        _draw_edge(axes, edge, route)
    for node, (x, y) in places.items():
        _draw_node(axes, COLORS[color_of(dag.nodes[node])], texts[node], x, y, grid)
    if not is_wide:
        _draw_edge_labels(axes, layout, routes, [(x, y, wide, grid.tall) for x, y in places.values()])
    _draw_heading(figure, dag, layout, filter, height)
    return figure


def _lines(dag: Dag, node: NodeId, is_wide: bool) -> tuple[str, ...]:
    if is_wide:
        return (short_label(dag.nodes[node], several_stages=has_several_stages(dag)),)
    return tuple(text if len(text) <= 27 else text[:13] + "…" + text[-13:] for text in node_lines(dag.nodes[node]))


def _wide(lines: tuple[str, ...]) -> float:
    """Inches of the widest line of a node; the first of two is bold."""
    weights = ("bold" if len(lines) == 2 and lines[1] else "normal", "normal")
    return max(inches(line, 7, weight) for line, weight in zip(lines, weights, strict=False))


def _band_top(layout: Layout, grid: Grid, band: str) -> float:
    return TOP + layout.bands[band][0] * grid.row + list(layout.bands).index(band) * MARGIN


def _place(layout: Layout, grid: Grid, node: NodeId) -> tuple[float, float]:
    """The upper left corner of a node."""
    column, row = layout.places[node]
    number = sum(first <= row for first, _ in layout.bands.values())
    x = LEFT + column * grid.column + (grid.column - grid.wide) / 2
    return x, TOP + row * grid.row + (number - 0.5) * MARGIN + (grid.row - grid.tall) / 2


def _draw_bands(axes: Axes, layout: Layout, grid: Grid) -> None:
    for number, (band, (_, count)) in enumerate(layout.bands.items()):
        top, tall = _band_top(layout, grid, band), count * grid.row + MARGIN
        axes.axhspan(top, top + tall, color=IDLE if number % 2 == 0 else "white", alpha=0.6, linewidth=0, zorder=0)
        axes.text(0.15, top + tall / 2, band, fontsize=9, fontweight="bold", color=INK, va="center")


def _draw_edge(axes: Axes, edge: Edge, route: Route) -> None:
    from matplotlib.patches import FancyArrowPatch

    arrow = FancyArrowPatch(
        path=_rounded(route), arrowstyle="-|>", mutation_scale=7, linewidth=1.0,
        color=TRANSFER if edge.is_transfer else VALUE, alpha=0.9 if edge.is_transfer else 0.8,
        linestyle="-" if edge.values else (0, (3, 2)), shrinkA=0, shrinkB=0, zorder=1,
    )  # fmt: skip
    axes.add_patch(arrow)


def _rounded(route: Route) -> Curve:
    """A path with round corners; between neighbouring columns an S."""
    from matplotlib.path import Path as Curve

    (x, y), (u, v) = route[0], route[-1]
    if len(route) == 2:
        middle = (x + u) / 2
        return Curve([(x, y), (middle, y), (middle, v), (u, v)], [Curve.MOVETO, *[Curve.CURVE4] * 3])
    points: list[Point] = [(x, y)]
    codes = [Curve.MOVETO]
    for before, corner, after in zip(route, route[1:], route[2:], strict=False):
        points += [_towards(corner, before), corner, _towards(corner, after)]
        codes += [Curve.LINETO, Curve.CURVE3, Curve.CURVE3]
    return Curve([*points, (u, v)], [*codes, Curve.LINETO])


def _towards(corner: Point, other: Point) -> Point:
    """Where the bend at ``corner`` meets the line to ``other``."""
    length = abs(other[0] - corner[0]) + abs(other[1] - corner[1])
    share = min(ROUND / length, 0.5) if length else 0.0
    return corner[0] + share * (other[0] - corner[0]), corner[1] + share * (other[1] - corner[1])


def _draw_node(axes: Axes, face: str, lines: tuple[str, ...], x: float, y: float, grid: Grid) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch((x, y), grid.wide, grid.tall, boxstyle="round,pad=0,rounding_size=0.05", facecolor=face,
                       edgecolor="none", zorder=3)
    )  # fmt: skip
    shifts = (0.3, 0.7) if len(lines) == 2 and lines[1] else (0.5,)
    for line, shift in zip(lines, shifts, strict=False):
        weight = "bold" if shift == 0.3 else "normal"
        axes.text(x + grid.wide / 2, y + shift * grid.tall, line, fontsize=7, fontweight=weight, color=ink_on(face),
                  ha="center", va="center", zorder=5)  # fmt: skip


def _draw_edge_labels(axes: Axes, layout: Layout, routes: list[Route], taken: list[Box]) -> None:
    """Writes what an edge carries where it covers no node and no other label; else the edge stays without."""
    for edge, route in zip(layout.edges, routes, strict=True):
        text = _edge_label(edge.values)
        wide, tall = inches(text, 6) + 0.06, 0.12
        start, end = route[len(route) // 2 - 1 :][:2]
        middles = [
            (start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1]))
            for share in (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8)
        ]
        boxes = ((x - wide / 2, y - tall / 2, wide, tall) for x, y in middles)
        free = next((box for box in boxes if not any(_overlap(box, other) for other in taken)), None)
        if text and free is not None:
            taken.append(free)
            paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6}
            axes.text(free[0] + wide / 2, free[1] + tall / 2, text, fontsize=6, color=MUTED, ha="center", va="center",
                      bbox=paper, zorder=2)  # fmt: skip


@lru_cache(maxsize=4096)
def inches(text: str, size: float, weight: str = "normal") -> float:
    """How wide a text is."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    path = TextPath((0, 0), text or " ", prop=FontProperties(weight=weight, size=size))
    return float(path.get_extents().width) / 72 if text else 0.0


def _overlap(one: Box, other: Box) -> bool:
    return all(one[axis] < other[axis] + other[axis + 2] and other[axis] < one[axis] + one[axis + 2] for axis in (0, 1))


def _edge_label(values: tuple[str, ...]) -> str:
    """The value, or only what it is where its name repeats the op or the bucket."""
    if not values:
        return ""
    word = values[0].partition(" ")[0]
    first = word if word in ("residuals", "gradient", "parameters", "weight") else values[0]
    shown = first if len(first) <= 22 else first[:10] + "…" + first[-11:]
    return shown if len(values) == 1 else f"{shown} +{len(values) - 1}"


def _draw_heading(figure: Figure, dag: Dag, layout: Layout, filter: Filter | None, height: float) -> None:
    """What is shown, and what colours and lines mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    title = f"{filter}" if filter is not None else "the whole plan"
    left = 0.15 / figure.get_size_inches()[0]
    figure.text(
        left,
        1 - 0.18 / height,
        f"{title}: {counted(len(layout.places), 'node')}",
        fontsize=10,
        fontweight="bold",
        color=INK,
        va="center",
    )
    used = {color_of(dag.nodes[node]) for node in layout.places}
    handles: list[Patch | Line2D] = [Patch(color=COLORS[kind], label=meaning(kind)) for kind in COLORS if kind in used]
    kinds = {(edge.is_transfer, bool(edge.values)) for edge in layout.edges}
    lines = {(False, True): "value", (True, True): "transfer to another group", (False, False): "only order"}
    handles += [
        Line2D([], [], color=TRANSFER if kind[0] else VALUE, linestyle="-" if kind[1] else (0, (3, 2)), label=name)
        for kind, name in lines.items()
        if kind in kinds
    ]
    figure.legend(
        handles=handles, ncols=len(handles), fontsize=7.5, loc="center left", bbox_to_anchor=(left, 1 - 0.44 / height),
        frameon=False, labelcolor=MUTED, handlelength=1.3, handleheight=0.9, handletextpad=0.5, columnspacing=1.2,
        borderpad=0, borderaxespad=0,
    )  # fmt: skip
