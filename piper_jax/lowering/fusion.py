"""Adjacent slots of a group become one program where that cannot hold up a transfer.

Before --> after, on the last stage of 1F1B::

    [F0] [B0] [F1] [B1]    -->    [F0 B0] [F1 B1]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute


def fuse(
    dag: Dag, order: Sequence[Slot], lowered: Callable[[NodeId], bool], member: Callable[[NodeId], bool]
) -> tuple[Slot, ...]:
    """Joins a slot to the one before it on its group if it uses its results and no receive and no send lies between.

    Args:
      dag: completed.
      order: dispatch order.
      lowered: which nodes are lowered at all (only forward ones when evaluating); others are left out.
      member: which nodes are part of programs: compute, and collectives on its own group.
    """
    users: dict[NodeId, list[NodeId]] = {}
    sources: dict[NodeId, list[NodeId]] = {}
    for edge in dag.data:
        users.setdefault(edge.src, []).append(edge.dst)
        sources.setdefault(edge.dst, []).append(edge.src)
    result: list[Slot] = []
    last: dict[str, int] = {}
    done: dict[NodeId, int] = {}
    for slot in order:
        nodes = tuple(n for n in slot.nodes if lowered(n))
        if not nodes:
            continue
        before = last.get(slot.group)
        computes = all(member(n) for n in nodes)
        if before is not None and computes and _joins(dag, result[before].nodes, nodes, users, sources, done, before):
            result[before] = Slot(group=slot.group, nodes=(*result[before].nodes, *nodes))
            continue
        if computes:
            last[slot.group] = len(result)
        done.update((n, len(result)) for n in nodes if isinstance(dag.nodes[n], Collective))
        result.append(Slot(group=slot.group, nodes=nodes))
    return tuple(result)


def _joins(
    dag: Dag,
    first: Sequence[NodeId],
    second: Sequence[NodeId],
    users: dict[NodeId, list[NodeId]],
    sources: dict[NodeId, list[NodeId]],
    done: dict[NodeId, int],
    position: int,
) -> bool:
    """``done`` has the positions of collectives, ``position`` is that of the first slot."""
    members = {*first, *second}
    uses = any(src in first for n in second for src in sources.get(n, ()))
    inputs = [src for n in second for src in sources.get(n, ())]
    own_inputs = all(isinstance(dag.nodes[src], Compute) or done.get(src, position) < position for src in inputs)
    kept_inside = all(dst in members for n in first for dst in users.get(n, ()))
    return uses and own_inputs and kept_inside
