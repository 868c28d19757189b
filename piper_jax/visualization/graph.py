"""The DAG, or the part of it that a filter selects, as a graph: time from left to right, a band for each group.

A transfer (a send and its receive) is drawn as one edge.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from piper_jax.errors import FilterError
from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import Filter
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, Node, Recv, Send, Update
from piper_jax.ir.selection import select
from piper_jax.visualization.picture import INK, MUTED, figure_class
from piper_jax.visualization.scene import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NODES = 600
MAX_LABELLED_EDGES = 60
COLUMN, ROW = 1.7, 0.78  # inches between ranks and between rows
TRANSFER = "#c2603a"


class Edge(NamedTuple):
    """Values (none for an order edge) from one node to another, on one group or as a transfer to another."""

    src: NodeId
    dst: NodeId
    values: tuple[str, ...]
    is_transfer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Places of nodes: column (rank) and row. ``bands`` gives the first row and the number of rows of each group."""

    places: Mapping[NodeId, tuple[int, int]]
    bands: Mapping[str, tuple[int, int]]
    edges: tuple[Edge, ...]


def save_graph(dag: Dag, path: Path, filter: Filter | None = None) -> None:
    """Writes the graph to ``path``: ``.svg``, ``.png``, ``.pdf``, or ``.html`` with the SVG inside."""
    figure = graph_figure(dag, filter)
    if path.suffix.lower() != ".html":
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        return
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    svg = stream.getvalue()
    title = escape(f"graph of {filter}" if filter is not None else "graph of the plan")
    page = f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n<body>'
    path.write_text(page + svg[svg.index("<svg") :] + "</body></html>\n", encoding="utf-8")


def chosen_nodes(dag: Dag, filter: Filter | None) -> tuple[NodeId, ...]:
    """The nodes that ``filter`` selects and the collectives between them, in node order.

    Raises:
      FilterError: more than 600 nodes, too many to read.
    """
    if filter is None:
        kept = set(dag.nodes)
    else:
        kept = set(select(dag, filter))
        kept |= _reached(dag, kept, forwards=True) & _reached(dag, kept, forwards=False)
    kept = {node for node in kept if not isinstance(dag.nodes[node], Send | Recv)}
    if len(kept) > MAX_NODES:
        raise FilterError(
            f"a graph of {len(kept)} nodes cannot be read.",
            help="select fewer, such as select=where(MB=0) or --select MB=0.",
        )
    return tuple(node for node in dag.nodes if node in kept)


def _reached(dag: Dag, start: set[NodeId], *, forwards: bool) -> set[NodeId]:
    """Communication nodes that are reached from ``start`` over communication nodes only."""
    after: dict[NodeId, list[NodeId]] = defaultdict(list)
    for edge in dag.data:
        src, dst = (edge.src, edge.dst) if forwards else (edge.dst, edge.src)
        if isinstance(dag.nodes[dst], Send | Recv | Collective):
            after[src].append(dst)
    found: set[NodeId] = set()
    pending = list(start)
    while pending:
        for node in after[pending.pop()]:
            if node not in found:
                found.add(node)
                pending.append(node)
    return found


def layout_of(dag: Dag, filter: Filter | None = None) -> Layout:
    """Ranks nodes by the longest path that leads to them, and gives each group as many rows as it needs."""
    nodes = chosen_nodes(dag, filter)
    kept = set(nodes)
    edges = [edge for edge in _edges(dag) if edge.src in kept and edge.dst in kept]
    ranks = _ranks(nodes, edges)
    used: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    rows: dict[NodeId, int] = {}
    for node in nodes:
        band = _band(dag.nodes[node])
        rows[node] = used[band][ranks[node]]
        used[band][ranks[node]] += 1
    order = {name: place for place, name in enumerate(dag.groups)}
    bands: dict[str, tuple[int, int]] = {}
    first = 0
    for band in sorted(used, key=lambda name: (order.get(name, len(order)), len(name), name)):
        bands[band] = (first, max(used[band].values()))
        first += bands[band][1]
    places = {node: (ranks[node], bands[_band(dag.nodes[node])][0] + rows[node]) for node in nodes}
    return Layout(places=places, bands=bands, edges=tuple(edges))


def _edges(dag: Dag) -> list[Edge]:
    """Data and order edges, with producer, send, receive, consumer joined to one edge."""
    sender: dict[NodeId, NodeId] = {}
    for edge in dag.data:
        if isinstance(dag.nodes[edge.dst], Send):
            sender[edge.dst] = edge.src
    edges: list[Edge] = []
    for edge in dag.data:
        src, dst = dag.nodes[edge.src], dag.nodes[edge.dst]
        if isinstance(src, Recv) and src.match in sender:
            edges.append(Edge(sender[src.match], edge.dst, edge.values, is_transfer=True))
        elif not isinstance(src, Send) and not isinstance(dst, Send):
            edges.append(Edge(edge.src, edge.dst, edge.values))
    return edges + [Edge(edge.src, edge.dst, ()) for edge in dag.order]


def _band(node: Node) -> str:
    if node.group is not None:
        return node.group
    return "" if node.id.PP is None else f"stage {node.id.PP}"


def _ranks(nodes: Iterable[NodeId], edges: Iterable[Edge]) -> dict[NodeId, int]:
    after: dict[NodeId, list[NodeId]] = defaultdict(list)
    incoming = dict.fromkeys(nodes, 0)
    for edge in edges:
        after[edge.src].append(edge.dst)
        incoming[edge.dst] += 1
    ranks = dict.fromkeys(incoming, 0)
    ready = [node for node, count in incoming.items() if not count]
    for node in ready:
        for other in after[node]:
            ranks[other] = max(ranks[other], ranks[node] + 1)
            incoming[other] -= 1
            if not incoming[other]:
                ready.append(other)
    return ranks


def graph_figure(dag: Dag, filter: Filter | None = None) -> Figure:
    """The matplotlib figure of the graph."""
    layout = layout_of(dag, filter)
    num_columns = 1 + max((column for column, _ in layout.places.values()), default=0)
    num_rows = sum(count for _, count in layout.bands.values())
    figure: Figure = figure_class()(figsize=(1.0 + COLUMN * num_columns, 0.45 + ROW * num_rows), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.set_xlim(-0.5 - 0.9 / COLUMN, num_columns - 0.5 + 0.1 / COLUMN)
    axes.set_ylim(num_rows - 0.5, -0.5 - 0.45 / ROW)
    title = f"{filter}" if filter is not None else "the whole plan"
    axes.text(-0.5 - 0.8 / COLUMN, -0.5 - 0.16 / ROW, f"{title}: {len(layout.places)} nodes", fontsize=9, color=MUTED)
    for number, (band, (first, count)) in enumerate(layout.bands.items()):
        shade = "#f3f5f7" if number % 2 == 0 else "#ffffff"
        axes.axhspan(first - 0.5, first + count - 0.5, color=shade, linewidth=0, zorder=0)
        axes.text(
            -0.5 - 0.8 / COLUMN, first + count / 2 - 0.5, band, fontsize=9, fontweight="bold", color=INK, va="center"
        )
    for edge in layout.edges:
        _draw_edge(axes, layout, edge)
    for node, (column, row) in layout.places.items():
        _draw_node(axes, dag, dag.nodes[node], column, row)
    return figure


def _draw_edge(axes: Axes, layout: Layout, edge: Edge) -> None:
    from matplotlib.patches import FancyArrowPatch

    (left, top), (right, bottom) = layout.places[edge.src], layout.places[edge.dst]
    wide, tall = (right - left - 0.72) * COLUMN, (top - bottom) * ROW
    length = math.hypot(wide, tall) or 1.0
    bend = 0.0 if top != bottom or right == left + 1 else 0.75 / length
    arrow = FancyArrowPatch(
        (left + 0.36, top), (right - 0.36, bottom), arrowstyle="-|>", mutation_scale=8, linewidth=1.0,
        color=TRANSFER if edge.is_transfer else "#9aa5b1", linestyle="-" if edge.values else (0, (3, 2)),
        connectionstyle=f"arc3,rad={bend}", shrinkA=0, shrinkB=0, zorder=1,
    )  # fmt: skip
    axes.add_patch(arrow)
    if edge.values and len(layout.edges) <= MAX_LABELLED_EDGES:
        x = (left + right) / 2 + bend * tall / 2 / COLUMN
        y = (top + bottom) / 2 + bend * wide / 2 / ROW
        paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8}
        text = _edge_label(edge.values)
        axes.text(x, y, text, fontsize=6, color=MUTED, ha="center", va="center", bbox=paper, zorder=2)


def _edge_label(values: tuple[str, ...]) -> str:
    """The value, or only what it is where its name repeats the op or the bucket."""
    word = values[0].partition(" ")[0]
    first = word if word in ("residuals", "gradient", "parameters", "weight") else _shortened(values[0])
    return first if len(values) == 1 else f"{first} +{len(values) - 1}"


def _draw_node(axes: Axes, dag: Dag, node: Node, column: int, row: int) -> None:
    from matplotlib.patches import FancyBboxPatch

    match node:
        case Compute() | Update():
            face, ink = COLORS[node.id.PASS or "F"], "white"
        case Send() | Recv():
            face, ink = "#e4e8ec", INK
        case Collective():
            face, ink = COLORS[node.kind], "white"
    box = FancyBboxPatch(
        (column - 0.34, row - 0.27), 0.68, 0.54, boxstyle="round,pad=0.02,rounding_size=0.06", facecolor=face,
        edgecolor="white", linewidth=0.8, mutation_aspect=COLUMN / ROW, zorder=3,
    )  # fmt: skip
    axes.add_patch(box)
    head, _, tail = str(node.id).partition(" ")
    for text, shift, size in ((head, -0.1, 7), (_shortened(tail), 0.13, 6)):
        axes.text(column, row + shift, text, fontsize=size, color=ink, ha="center", va="center", zorder=5)


def _shortened(text: str) -> str:
    return text if len(text) <= 22 else text[:10] + "…" + text[-11:]
