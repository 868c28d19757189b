"""Finding and printing a cycle of the contracted graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from piper_jax.errors import PlanError
from piper_jax.ir.contraction import Contraction
from piper_jax.ir.dag import Dag
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


def cycle_steps(dag: Dag, contraction: Contraction, cycle: Sequence[int]) -> list[tuple[str, NodeId, NodeId]]:
    """The edges along a cycle: each its kind (``data`` or ``order``), its source and its destination."""
    wanted = dict(zip(cycle, (*cycle[1:], cycle[0]), strict=True))
    found: dict[int, tuple[str, NodeId, NodeId]] = {}
    for kind, edges in (("data", dag.data), ("order", dag.order)):
        for edge in edges:
            before, after = contraction.vertex_of[edge.src], contraction.vertex_of[edge.dst]
            if wanted.get(before) == after and before != after:
                found.setdefault(before, (kind, edge.src, edge.dst))
    for before, after in wanted.items():
        src, dst = contraction.vertices[before][0].nodes[0], contraction.vertices[after][0].nodes[0]
        found.setdefault(before, ("order", src, dst))
    return [found[vertex] for vertex in cycle]


def cycle_lines(steps: Sequence[tuple[str, NodeId, NodeId]], this_directive: int | None = None) -> list[str]:
    """A printed cycle, at most ten lines; ``this_directive`` marks the step that a directive has just added."""
    lines = [str(steps[0][1])]
    for i, (kind, src, dst) in enumerate(steps):
        previous = steps[i - 1][2] if i else steps[0][1]
        inside = f" (in one slot with {_short(previous)})" if src != previous else ""
        mark, note = ("> ", "  (this directive)") if i == this_directive else ("  ", "")
        via = f"{_short(src)} -> " if src != previous else ""
        lines.append(f"{mark}-> {kind:5} {via}{dst}{inside}{note}")
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
        f"this plan would deadlock: {_short(steps[0][1])} waits for itself.",
        detail=cycle_lines(steps),
        help="change the order of one of the slots on this cycle.",
        cycle=tuple(step[1] for step in steps),
    )
