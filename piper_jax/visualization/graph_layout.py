"""Where the nodes of a graph are: execution from left to right, a band for each group.

A transfer (a send and its receive) is one edge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from piper_jax.errors import FilterError
from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import Filter
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, Node, Recv, Send, Update
from piper_jax.ir.selection import select

Link = tuple[NodeId, NodeId]


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

    @property
    def num_columns(self) -> int:
        return 1 + max((column for column, _ in self.places.values()), default=0)

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.bands.values())


def layout_of(dag: Dag, filter: Filter | None = None, *, max_nodes: int, instead: str = "") -> Layout:
    """Ranks nodes by the longest path that leads to them, over edges and over the order of the slots of each group.

    Args:
      max_nodes: how many can be read.  instead: what else to do about more than that.

    Raises:
      FilterError: the filter selects nothing, or more than ``max_nodes``.
    """
    nodes = _chosen_nodes(dag, filter, max_nodes, instead)
    kept = set(nodes)
    edges = [edge for edge in _edges(dag) if edge.src in kept and edge.dst in kept]
    ranks = _ranks(nodes, [(edge.src, edge.dst) for edge in edges] + _slot_links(dag, kept))
    used: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    rows: dict[NodeId, int] = {}
    for node in sorted(nodes, key=lambda node: not isinstance(dag.nodes[node], Compute | Update)):
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


def _chosen_nodes(dag: Dag, filter: Filter | None, max_nodes: int, instead: str) -> tuple[NodeId, ...]:
    """The nodes that ``filter`` selects and the collectives between them, in node order."""
    if filter is None:
        kept = set(dag.nodes)
    else:
        kept = set(select(dag, filter))
        kept |= _reached(dag, kept, forwards=True) & _reached(dag, kept, forwards=False)
    kept = {node for node in kept if not isinstance(dag.nodes[node], Send | Recv)}
    if len(kept) > max_nodes:
        raise FilterError(
            f"a graph of {len(kept)} nodes cannot be read.",
            help=f"select fewer, such as select=where(MB=0) or --select MB=0{instead}.",
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


def _slot_links(dag: Dag, kept: set[NodeId]) -> list[Link]:
    """From each slot of a group to its next one; not drawn, they only give nodes their columns."""
    slots: dict[str, list[list[NodeId]]] = defaultdict(list)
    for slot in dag.slots:
        members = [node for node in slot.nodes if node in kept]
        if members:
            slots[slot.group].append(members)
    return [(src, dst) for rows in slots.values() for here, there in pairwise(rows) for src in here for dst in there]


def _band(node: Node) -> str:
    if node.group is not None:
        return node.group
    return "" if node.id.PP is None else f"stage {node.id.PP}"


def _ranks(nodes: Iterable[NodeId], links: Iterable[Link]) -> dict[NodeId, int]:
    after: dict[NodeId, list[NodeId]] = defaultdict(list)
    incoming = dict.fromkeys(nodes, 0)
    for src, dst in links:
        after[src].append(dst)
        incoming[dst] += 1
    ranks = dict.fromkeys(incoming, 0)
    ready = [node for node, count in incoming.items() if not count]
    for node in ready:
        for other in after[node]:
            ranks[other] = max(ranks[other], ranks[node] + 1)
            incoming[other] -= 1
            if not incoming[other]:
                ready.append(other)
    return ranks
