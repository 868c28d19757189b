"""Adjacent slots of a group become one program where that cannot hold up a transfer.

Before --> after, on the last stage of 1F1B::

    [F0] [B0] [F1] [B1]    -->    [F0 B0] [F1 B1]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeGuard

from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.ids import NodeId
from piper_jax.ir.linear import dispatch_order
from piper_jax.ir.nodes import Collective, Compute, Node
from piper_jax.ir.ownership import ownerships

When = Literal["slot", "before", "after"]
STATE = ("gradient", "parameters", "state", "carried")
"""First words of the values of state buckets."""


def programs(dag: Dag) -> tuple[Slot, ...]:
    """What a training step dispatches, in its order: each slot is one program, or one transfer. Computed once.

    Collectives that are part of an update are slots of their own here, though nothing runs for them.
    """
    known = dag.memo.get("programs")
    if known is None:
        known = dag.memo["programs"] = fuse(dag, dispatch_order(dag))
    return known


def when_of(dag: Dag, node: Collective) -> When:
    """When a collective on state runs: beside compute, or as the beginning or the end of an update.

    On one group it is part of that program, of the first or the last round of the update; on several it is its own.
    """
    if node.kind == "all_gather" and all(value.startswith("parameters ") for value in node.values):
        return "after" if node.id.PASS == "U" else "slot"
    if node.kind == "reduce_scatter" and _span(dag, node) is not None:
        return "slot"
    return "slot" if node.id in _listed(dag) else "before"


def _span(dag: Dag, node: Collective) -> int | None:
    owned = ownerships(dag).get(node.values[0].removeprefix("gradient "))
    return None if owned is None else owned.span


def _listed(dag: Dag) -> frozenset[NodeId]:
    """The members of named slots."""
    known = dag.memo.get("listed")
    if known is None:
        known = dag.memo["listed"] = frozenset(node for slot in dag.slots for node in slot.nodes)
    return known


def moves_state(node: Node) -> TypeGuard[Collective]:
    """Whether a node is a collective on gradients, parameters, optimizer state or carried state."""
    return isinstance(node, Collective) and any(value.partition(" ")[0] in STATE for value in node.values)


def fuse(dag: Dag, order: Sequence[Slot], lowered: Callable[[NodeId], bool] = lambda node: True) -> tuple[Slot, ...]:
    """Joins a slot to the one before it on its group if it uses its results and no receive and no send lies between.

    Args:
      dag: completed.
      order: dispatch order.
      lowered: which nodes are lowered at all (only forward ones when evaluating); others are left out.
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
        computes = all(is_member(dag, n) for n in nodes)
        if before is not None and computes and _joins(dag, result[before].nodes, nodes, users, sources, done, before):
            result[before] = Slot(group=slot.group, nodes=(*result[before].nodes, *nodes))
            continue
        if computes:
            last[slot.group] = len(result)
        done.update((n, len(result)) for n in nodes if isinstance(dag.nodes[n], Collective))
        result.append(Slot(group=slot.group, nodes=nodes))
    return tuple(result)


def is_member(dag: Dag, node: NodeId) -> bool:
    """Whether a node is part of the program of a slot: compute, and its group's collectives on state and on tokens."""
    found = dag.nodes[node]
    if moves_state(found):
        return when_of(dag, found) == "slot" and "+" not in (found.group or "")
    return isinstance(found, Compute) or (isinstance(found, Collective) and found.kind == "all_to_all")


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
