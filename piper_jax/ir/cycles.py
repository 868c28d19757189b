"""Finding and printing a cycle of the contracted graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from piper_jax.errors import PlanError
from piper_jax.ir.contraction import Contraction
from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.device_groups import members_of
from piper_jax.ir.ids import NodeId
from piper_jax.ir.topology import in_order

MAX_STEPS = 9


def shortest_cycle(contraction: Contraction) -> tuple[int, ...]:
    """The vertices of a shortest cycle through the first vertex that lies on one."""
    stuck = set(range(len(contraction.vertices))).difference(contraction.ranked)
    start = _on_a_cycle(contraction, stuck)
    came_from: dict[int, int] = {}
    queue = deque((start,))
    while queue:
        vertex = queue.popleft()
        for after in contraction.successors[vertex]:
            if after == start:
                return tuple(reversed(tuple(_back(came_from, vertex, start))))
            if after in stuck and after not in came_from:
                came_from[after] = vertex
                queue.append(after)
    raise ValueError("the graph has no cycle")


def _on_a_cycle(contraction: Contraction, stuck: set[int]) -> int:
    """A vertex on a cycle: every stuck vertex has a stuck one before it, so walking back must meet itself."""
    before: dict[int, int] = {}
    for vertex in sorted(stuck):
        for after in contraction.successors[vertex]:
            if after in stuck:
                before.setdefault(after, vertex)
    vertex, seen = min(stuck), set[int]()
    while vertex not in seen:
        seen.add(vertex)
        vertex = before[vertex]
    return vertex


def _back(came_from: dict[int, int], vertex: int, start: int) -> Iterable[int]:
    while vertex != start:
        yield vertex
        vertex = came_from[vertex]
    yield start


class Step(NamedTuple):
    """One step along a printed cycle: ``dst`` waits for ``src``, or both happen together.

    ``kind``: ``data`` or ``order`` for an edge, ``with`` for members of one slot, ``meets`` for ends of one transfer.
    """

    kind: str
    src: NodeId
    dst: NodeId


def cycle_steps(dag: Dag, contraction: Contraction, cycle: Sequence[int]) -> list[Step]:
    """The steps along a cycle of vertices, from node to node and back to the first."""
    wanted = dict(zip(cycle, (*cycle[1:], cycle[0]), strict=True))
    found: dict[int, Step] = {}
    for kind, edges in (("data", dag.data), ("order", dag.order)):
        for edge in edges:
            before, after = contraction.vertex_of[edge.src], contraction.vertex_of[edge.dst]
            if wanted.get(before) == after and before != after:
                found.setdefault(before, Step(kind, edge.src, edge.dst))
    for before, after in wanted.items():
        if before not in found:
            found[before] = _chained(dag, contraction.vertices[before], contraction.vertices[after])
    edges = [found[vertex] for vertex in cycle]
    slot_of = {node: slot for vertex in cycle for slot in contraction.vertices[vertex] for node in slot.nodes}
    steps: list[Step] = []
    for edge, following in zip(edges, (*edges[1:], edges[0]), strict=True):
        steps.append(edge)
        if edge.dst != following.src:
            kind = "with" if slot_of[edge.dst] is slot_of[following.src] else "meets"
            steps.append(Step(kind, edge.dst, following.src))
    return steps


def _chained(dag: Dag, before: Sequence[Slot], after: Sequence[Slot]) -> Step:
    """The step between two slots that follow each other on a group."""
    pairs = [
        Step("order", one.nodes[-1], other.nodes[0])
        for one in before
        for other in after
        if set(members_of(one.group, dag.groups)).intersection(members_of(other.group, dag.groups))
    ]
    return pairs[0]


def cycle_lines(steps: Sequence[Step], this_directive: int | None = None) -> list[str]:
    """A printed cycle, at most ten lines; ``this_directive`` marks the step that a directive has just added."""
    lines = [str(steps[0].src)]
    for i, step in enumerate(steps):
        mark, note = ("> ", "  (this directive)") if i == this_directive else ("  ", "")
        lines.append(f"{mark}-> {step.kind:5} {step.dst}{note}")
    if len(lines) > MAX_STEPS + 1:
        keep = MAX_STEPS // 2
        lines = [*lines[:keep], f"  ... {len(lines) - MAX_STEPS} more steps", *lines[-(MAX_STEPS - keep) :]]
    return lines


def _short(node: NodeId) -> str:
    return str(node).split("] ")[0] + "]" if "[" in str(node) else str(node)


def internal_cycle(dag: Dag, contraction: Contraction) -> PlanError | None:
    """The error for members of one slot that wait for each other, or None."""
    fused = {v for v, slots in enumerate(contraction.vertices) if any(len(slot.nodes) > 1 for slot in slots)}
    inside: dict[int, list[tuple[NodeId, NodeId]]] = {}
    for edge in (*dag.data, *dag.order):
        vertex = contraction.vertex_of[edge.src]
        if vertex in fused and vertex == contraction.vertex_of[edge.dst]:
            inside.setdefault(vertex, []).append((edge.src, edge.dst))
    for vertex, edges in inside.items():
        nodes = [node for slot in contraction.vertices[vertex] for node in slot.nodes]
        position = {node: i for i, node in enumerate(in_order(dict.fromkeys(nodes), edges))}
        for src, dst in edges:
            if position[src] >= position[dst]:
                return PlanError(
                    f"this plan would deadlock: {src} and {dst} wait for each other inside one slot.",
                    help="list them as separate slots.",
                )
    return None


def cycle_error(dag: Dag, contraction: Contraction) -> PlanError:
    """The error that prints a shortest cycle."""
    cycle = shortest_cycle(contraction)
    steps = cycle_steps(dag, contraction, cycle)
    return PlanError(
        f"this plan would deadlock: {_short(steps[0].src)} waits for itself.",
        detail=cycle_lines(steps),
        help="change the order of one of the slots on this cycle.",
        cycle=tuple(step.src for step in steps),
    )
