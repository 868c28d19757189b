"""Ways of edges that cross no node: between columns up and down, between rows along."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from piper_jax.ir.ids import NodeId
from piper_jax.visualization.graph_layout import Edge, Layout

Point = tuple[float, float]
Route = tuple[Point, ...]
TRACKS = 5  # beside each other between two rows; further edges share them
NEAR = 0.36  # of the way between two columns: where an edge turns


class Grid(NamedTuple):
    """Inches: distance of columns and rows, width and height of nodes."""

    column: float
    row: float
    wide: float
    tall: float


def routes_of(layout: Layout, places: Mapping[NodeId, Point], grid: Grid) -> list[Route]:
    """The corners of each edge, first and last at its nodes; two where nothing lies between.

    An edge over several columns turns behind its first node into the space between rows, on the side of its last node
    (below, in the same row), and turns again before that one. Edges that would lie on each other have tracks.

    Args:
      places: upper left corners.
    """
    tracks = tracks_of(layout)
    space = grid.row - grid.tall
    routes: list[Route] = []
    for edge in layout.edges:
        (left, top), (right, bottom) = places[edge.src], places[edge.dst]
        start, end = (left + grid.wide, top + grid.tall / 2), (right, bottom + grid.tall / 2)
        if edge not in tracks:
            routes.append((start, end))
            continue
        share = (1 + tracks[edge]) / (TRACKS + 1)
        along = top - share * space if end[1] < start[1] else top + grid.tall + share * space
        turn = (grid.column - grid.wide) * NEAR
        behind, before = start[0] + turn * (1.3 - share), end[0] - turn * (0.7 + share)
        routes.append((start, (behind, start[1]), (behind, along), (before, along), (before, end[1]), end))
    return routes


def tracks_of(layout: Layout) -> dict[Edge, int]:
    """For each edge over several columns the first track along its row that is free, shorter ones nearer to nodes."""
    busy: dict[tuple[int, bool], list[list[tuple[int, int]]]] = defaultdict(lambda: [[] for _ in range(TRACKS)])
    tracks: dict[Edge, int] = {}

    def ends(edge: Edge) -> tuple[int, int]:
        return layout.places[edge.src][0], layout.places[edge.dst][0]

    far = [edge for edge in layout.edges if ends(edge)[1] - ends(edge)[0] > 1]
    for edge in sorted(far, key=lambda edge: (ends(edge)[1] - ends(edge)[0], ends(edge))):
        first, last = ends(edge)
        row, target = layout.places[edge.src][1], layout.places[edge.dst][1]
        rows = busy[row, target < row]
        free = (n for n, taken in enumerate(rows) if all(last <= a or b <= first for a, b in taken))
        tracks[edge] = next(free, len(tracks) % TRACKS)
        rows[tracks[edge]].append((first, last))
    return tracks
