"""The contracted graph: each slot, and each matched transfer or collective, is one vertex.

A plan runs without deadlock exactly when this graph is acyclic: a program starts as a whole and a transfer needs both
of its ends, so an order that looks consistent node by node, or between every pair of groups, may still be stuck.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.device_groups import members_of
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, Node, Recv, Send, Update

PASS_WEIGHT = {"F": 2, "B": 4, "BI": 2, "BW": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contraction:
    """The contracted graph of a DAG.

    Attributes:
      vertices: for each vertex its slots: one, or a send with its matching receive.
      vertex_of: the vertex of each node.
      successors: for each vertex the vertices that follow it; repeated where several edges agree.
      starts: for each vertex the length of the longest path to it (F counts 2, B 4, communication 1); a time at
        which it could start. Too small for vertices on or behind a cycle.
      ranked: the vertices that no cycle blocks, by start; communication first at equal starts, then in node order.
    """

    vertices: Sequence[Sequence[Slot]]
    vertex_of: dict[NodeId, int]
    successors: Sequence[Sequence[int]]
    starts: Sequence[int]
    ranked: tuple[int, ...] = field(repr=False)

    @property
    def is_acyclic(self) -> bool:
        return len(self.ranked) == len(self.vertices)


def contract(dag: Dag) -> Contraction:
    """The contracted graph of ``dag``, computed once."""
    known = dag.memo.get("contraction")
    if known is None:
        known = dag.memo["contraction"] = _contract(dag)
    return known


def _contract(dag: Dag) -> Contraction:
    vertices, vertex_of = _vertices(dag)
    successors: list[list[int]] = [[] for _ in vertices]
    incoming = [0] * len(vertices)
    pairs: list[tuple[int, int]] = [(vertex_of[e.src], vertex_of[e.dst]) for e in dag.data]
    pairs += [(vertex_of[e.src], vertex_of[e.dst]) for e in dag.order]
    pairs += _chains(dag, vertex_of)
    for before, after in pairs:
        if before != after:
            successors[before].append(after)
            incoming[after] += 1
    starts = _starts(dag, vertices, successors, incoming)
    position = {node: i for i, node in enumerate(dag.nodes)}
    first = [min(position[n] for slot in slots for n in slot.nodes) for slots in vertices]
    reached = [v for v in range(len(vertices)) if not incoming[v]]
    moves = [isinstance(dag.nodes[slots[0].nodes[0]], Send | Recv | Collective) for slots in vertices]
    ranked = tuple(sorted(reached, key=lambda v: (starts[v], not moves[v], first[v])))
    return Contraction(vertices=vertices, vertex_of=vertex_of, successors=successors, starts=starts, ranked=ranked)


def _vertices(dag: Dag) -> tuple[list[list[Slot]], dict[NodeId, int]]:
    vertices: list[list[Slot]] = []
    vertex_of: dict[NodeId, int] = {}
    rendezvous: list[tuple[int, int]] = []
    for slot in dag.slots:
        for node in slot.nodes:
            listed = vertex_of.setdefault(node, len(vertices))
            if listed != len(vertices):
                rendezvous.append((listed, len(vertices)))
        vertices.append([slot])
    for name, node in dag.nodes.items():
        match = node.match if isinstance(node, Send | Recv) else None
        if name in vertex_of:
            if match is not None and match in vertex_of:
                rendezvous.append((vertex_of[name], vertex_of[match]))
            continue
        slot = Slot(group=node.group or "", nodes=(name,))
        partner = vertex_of.get(match) if match is not None else None
        if partner is None:
            vertex_of[name] = len(vertices)
            vertices.append([slot])
        else:
            vertex_of[name] = partner
            vertices[partner].insert(0 if isinstance(node, Send) else len(vertices[partner]), slot)
    return _merged(vertices, vertex_of, rendezvous) if rendezvous else (vertices, vertex_of)


def _merged(
    vertices: list[list[Slot]], vertex_of: dict[NodeId, int], pairs: Iterable[tuple[int, int]]
) -> tuple[list[list[Slot]], dict[NodeId, int]]:
    """Merges the vertices of transfers and joint collectives that several named slots hold."""
    parent = list(range(len(vertices)))

    def root(v: int) -> int:
        while parent[v] != v:
            parent[v] = v = parent[parent[v]]
        return v

    for one, other in pairs:
        low, high = sorted((root(one), root(other)))
        parent[high] = low
    number: dict[int, int] = {}
    merged: list[list[Slot]] = []
    for v, slots in enumerate(vertices):
        if number.setdefault(root(v), len(merged)) == len(merged):
            merged.append([])
        merged[number[root(v)]].extend(slots)
    return merged, {node: number[root(v)] for node, v in vertex_of.items()}


def _chains(dag: Dag, vertex_of: dict[NodeId, int]) -> Iterable[tuple[int, int]]:
    """Vertices whose slots follow each other on a group."""
    last: dict[str, int] = {}
    for slot in dag.slots:
        vertex = vertex_of[slot.nodes[0]]
        for group in members_of(slot.group, dag.groups):
            if group in last:
                yield last[group], vertex
            last[group] = vertex


def _starts(
    dag: Dag, vertices: Sequence[Sequence[Slot]], successors: Sequence[Sequence[int]], incoming: list[int]
) -> list[int]:
    """Longest paths by Kahn's algorithm. Afterwards ``incoming`` is 0 exactly for the vertices that were reached."""
    starts = [0] * len(vertices)
    ready = [v for v, count in enumerate(incoming) if not count]
    for vertex in ready:
        end = starts[vertex] + max(1, sum(weight(dag.nodes[n]) for n in vertices[vertex][0].nodes))
        for after in successors[vertex]:
            starts[after] = max(starts[after], end)
            incoming[after] -= 1
            if not incoming[after]:
                ready.append(after)
    return starts


def weight(node: Node) -> int:
    """A rough duration, in units of half a forward pass, by which the nodes of a plan are ranked."""
    match node:
        case Compute():
            return PASS_WEIGHT[node.id.PASS or "F"]
        case Update():
            return 2
        case Send() | Recv() | Collective():
            return 1
        case _ as never:
            assert_never(never)
