"""Rules about what groups do together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

from piper_jax.errors import PlanError
from piper_jax.ir.contraction import contract
from piper_jax.ir.cycles import cycle_error, internal_cycle
from piper_jax.ir.dag import Dag
from piper_jax.ir.device_groups import members_of
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, Node, Recv, Send
from piper_jax.ir.rules.base import Checked

FROM_BATCH = frozenset({"weight"})
"""Values that follow from the batch alone, which every group has."""


def unmatched_transfers(checked: Checked) -> Iterator[PlanError]:
    """Sends without their receive and receives without their send."""
    dag = checked.dag
    for name, node in dag.nodes.items():
        if not isinstance(node, Send | Recv):
            continue
        other = dag.nodes.get(node.match)
        fault = ""
        if not isinstance(other, Recv if isinstance(node, Send) else Send):
            fault = f"matches {node.match}, which is no {'receive' if isinstance(node, Send) else 'send'}"
        elif other.match != name:
            fault = f"matches {node.match}, which matches {other.match}"
        elif (other.group, other.peer) != (node.peer, node.group):
            fault = f"is from {node.group} with {node.peer}, its match from {other.group} with {other.peer}"
        elif other.values != node.values:
            fault = f"carries {', '.join(node.values)}, its match {', '.join(other.values)}"
        if fault:
            yield PlanError(
                f"{name} {fault}.", help="a send and its receive name each other, the same values and groups."
            )


def unmoved_values(checked: Checked) -> Iterator[PlanError]:
    """Data edges between groups that nothing carries."""
    dag = checked.dag
    members = {name: frozenset(members_of(name, dag.groups)) for name in dag.groups}
    for edge in dag.data:
        src, dst = dag.nodes[edge.src], dag.nodes[edge.dst]
        if src.group == dst.group or (isinstance(src, Send) and src.match == edge.dst):
            continue
        if not members[src.group or ""] & members[dst.group or ""]:
            yield PlanError(
                f"{edge.dst} on {dst.group} reads {', '.join(edge.values)} of {edge.src} on {src.group}.",
                help="between groups values are sent and received; complete the plan.",
                edge=edge,
            )


def lost_values(checked: Checked) -> Iterator[PlanError]:
    """Reads without an edge that brings the value."""
    dag = checked.dag
    incoming: dict[NodeId, set[str]] = {name: set() for name in dag.nodes}
    for edge in dag.data:
        incoming[edge.dst].update(edge.values)
    read: dict[tuple[str, str | None], set[str]] = {}
    for name, node in dag.nodes.items():
        if isinstance(node, Compute):
            key = (name.op, _reads_like(name))
            read.setdefault(key, set()).update(v for v in incoming[name] if not v.startswith("parameters "))
    for op in dag.ops:
        for pass_, value in (("B", f"residuals {op}"), ("BW", f"weight residuals {op}")):
            if value in dag.values:
                read.get((op, pass_), set[str]()).add(value)
    for name, node in dag.nodes.items():
        match node:
            case Compute():
                wanted = read[name.op, _reads_like(name)]
            case Send() | Recv() | Collective(kind="all_reduce" | "reduce_scatter" | "all_to_all"):
                wanted = set(node.values) - FROM_BATCH
            case _:
                continue
        for value in sorted(wanted - incoming[name]):
            yield PlanError(
                f"no edge brings {value} to {name}.", help="complete the plan again from its directives.", node=name
            )


def _reads_like(name: NodeId) -> str | None:
    """The pass whose inputs a node has: BI reads what B reads."""
    return "B" if name.PASS == "BI" else name.PASS


def disagreeing_orders(checked: Checked) -> Iterator[PlanError]:
    """Two groups that name what they do together in opposite orders."""
    dag = checked.dag
    positions: dict[str, dict[NodeId, int]] = {}
    for slot in dag.slots:
        for group in members_of(slot.group, dag.groups):
            listed = positions.setdefault(group, {})
            for name in slot.nodes:
                meeting = _meeting(dag.nodes[name])
                if meeting is not None:
                    listed[meeting] = len(listed)
    for one, other in combinations(positions, 2):
        shared = sorted((m for m in positions[one] if m in positions[other]), key=positions[one].__getitem__)
        for first, second in pairwise(shared):
            if positions[other][first] > positions[other][second]:
                yield PlanError(
                    f"{one} and {other} disagree on what they do together first.",
                    detail=(f"{one}: {first}, then {second}", f"{other}: {second}, then {first}"),
                    help="list them in the same order on both.",
                )


def _meeting(node: Node) -> NodeId | None:
    """What identifies a transfer or collective for all groups that take part."""
    match node:
        case Send():
            return node.id
        case Recv():
            return node.match
        case Collective():
            return node.id
        case _:
            return None


def deadlocks(checked: Checked) -> Iterator[PlanError]:
    """Cycles of the contracted graph, and cycles inside one slot."""
    dag: Dag = checked.dag
    contraction = contract(dag)
    if not contraction.is_acyclic:
        yield cycle_error(dag, contraction)
        return
    error = internal_cycle(dag, contraction)
    if error is not None:
        yield error
