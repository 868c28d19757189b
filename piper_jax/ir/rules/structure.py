"""Rules about what a plan is made of."""

from __future__ import annotations

from collections.abc import Iterator

from piper_jax.errors import PlanError
from piper_jax.ir.dag import Dag
from piper_jax.ir.device_groups import impossible
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Compute, Node, Recv, Send, Update
from piper_jax.ir.rules.base import Checked

PASS_BIT = {"F": 1, "B": 2, "BI": 4, "BW": 8}
WHOLE, HALVES = 1 | 2, 1 | 4 | 8


def unknown_references(checked: Checked) -> Iterator[PlanError]:
    """Names that stand for nothing."""
    dag = checked.dag
    for edge in (*dag.data, *dag.order):
        for end in (edge.src, edge.dst):
            if end not in dag.nodes:
                yield PlanError(f"an edge names {end}, which is not a node.", help="name nodes of the plan.", node=end)
    for slot in dag.slots:
        for name in slot.nodes:
            if name not in dag.nodes:
                yield PlanError(
                    f"a slot of {slot.group} names {name}, which is not a node.", help="list nodes of the plan."
                )
    for op in dag.ops.values():
        for bucket in op.reads:
            if bucket not in dag.buckets:
                yield PlanError(f"{op.name} reads {bucket}, which is no state of the plan.", help="use a traced plan.")
    for name, node in dag.nodes.items():
        if node.group not in dag.groups and (checked.is_complete or node.group is not None):
            yield PlanError(
                f"{name} is on {node.group or 'no group'}, which the plan does not have.",
                help="call plan.place(...) for it.",
                node=name,
            )
        yield from _unknown_to(dag, node)


def _unknown_to(dag: Dag, node: Node) -> Iterator[PlanError]:
    op = dag.ops.get(node.id.op)
    match node:
        case Compute() if op is None:
            yield PlanError(f"{node.id} computes an operation that the plan does not have.", help="use a traced plan.")
        case Compute() if op and (op.PP, op.EP) != (node.id.PP, node.id.EP):
            yield PlanError(f"{node.id} is not at the PP and EP of {op.name}.", help="use a traced plan.")
        case Send() | Recv() if node.peer not in dag.groups:
            yield PlanError(f"{node.id} has peer {node.peer}, which the plan does not have.", help="name a group.")
        case Update():
            for bucket in node.buckets:
                if bucket not in dag.buckets:
                    yield PlanError(f"{node.id} updates {bucket}, which is no state of the plan.", node=node.id)
        case _:
            pass


def impossible_shapes(checked: Checked) -> Iterator[PlanError]:
    """Groups with more or fewer devices than their axes say, and batch dimensions that arrays do not have."""
    for group in checked.dag.groups.values():
        fault = impossible(group)
        if fault is not None:
            yield PlanError(fault[0], help=fault[1])
    for value in checked.dag.values.values():
        if value.batch_dim is not None and value.batch_dim >= len(value.shape):
            yield PlanError(f"{value.name} {value.shape} has no dimension {value.batch_dim}.", value=value.name)


def overlapping_groups(checked: Checked) -> Iterator[PlanError]:
    """Devices that are in two groups, or twice in one."""
    owner: dict[int, str] = {}
    for group in checked.dag.groups.values():
        for device in group.devices if "+" not in group.name else ():
            if device in owner:
                yield PlanError(
                    f"device {device} is in {owner[device]} and in {group.name}."
                    if owner[device] != group.name
                    else f"device {device} is in {group.name} twice.",
                    help="place stages on groups without common devices.",
                )
            owner[device] = group.name


def misplaced_operations(checked: Checked) -> Iterator[PlanError]:
    """Operations that are missing, or there twice, for a microbatch."""
    dag = checked.dag
    present: dict[tuple[str, int | None], int] = {}
    microbatches: set[int | None] = set()
    for name, node in dag.nodes.items():
        if isinstance(node, Compute):
            key = (name.op, name.MB)
            present[key] = present.get(key, 0) | PASS_BIT[name.PASS or "F"]
            microbatches.add(name.MB)
    expected = {None} if None in microbatches else set(range(dag.num_microbatches))
    if not microbatches <= expected:
        yield PlanError(
            f"microbatches {sorted(microbatches - expected, key=str)} are not among the {dag.num_microbatches}.",
            help="split the whole batch once.",
        )
    for op in dag.ops.values():
        for microbatch in sorted(expected, key=lambda mb: -1 if mb is None else mb):
            found = present.get((op.name, microbatch), 0)
            legal = (WHOLE, HALVES) if op.has_backward else (1,)
            if found not in legal:
                yield _misplaced(NodeId(op.name, None, op.PP, op.EP, microbatch), found, op.has_backward)


def _misplaced(name: NodeId, found: int, has_backward: bool) -> PlanError:
    passes = [p for p, bit in PASS_BIT.items() if found & bit]
    wanted = "F, and B or both BI and BW" if has_backward else "F alone"
    return PlanError(
        f"{name} has the passes {', '.join(passes) or 'none'}.",
        help=f"each microbatch needs {wanted}, once.",
        node=name,
    )


def separated_passes(checked: Checked) -> Iterator[PlanError]:
    """Backward passes on another group than their forward, which holds the residuals."""
    dag = checked.dag
    group_of = {
        (name.op, name.MB): node.group
        for name, node in dag.nodes.items()
        if isinstance(node, Compute) and name.PASS == "F"
    }
    for name, node in dag.nodes.items():
        if not isinstance(node, Compute) or name.PASS == "F":
            continue
        forward = group_of.get((name.op, name.MB), node.group)
        if forward != node.group:
            yield PlanError(
                f"{name} is on {node.group}, but its forward is on {forward}.",
                help="place both with one filter that does not name PASS.",
                node=name,
            )


def unsound_slots(checked: Checked) -> Iterator[PlanError]:
    """Nodes in two slots, slots that mix groups, and named orders that repeat a node."""
    dag = checked.dag
    seen: dict[NodeId, str] = {}
    for slot in dag.slots:
        for name in slot.nodes:
            group = dag.nodes[name].group or ""
            joint = "+" in group
            if group != slot.group and not joint:
                yield PlanError(
                    f"{name} is on {group}, but in a slot of {slot.group}.", help="list it in a slot of its own group."
                )
            if name in seen and not (joint and seen[name] != slot.group):
                yield PlanError(f"{name} is in two slots of {slot.group}.", help="list each node once.", node=name)
            seen[name] = slot.group


def misordered_members(checked: Checked) -> Iterator[PlanError]:
    """Members of a slot that are listed before what they read."""
    dag = checked.dag
    position = {name: (i, k) for i, slot in enumerate(dag.slots) for k, name in enumerate(slot.nodes)}
    for edge in (*dag.data, *dag.order):
        src, dst = position.get(edge.src), position.get(edge.dst)
        if src is not None and dst is not None and src[0] == dst[0] and src[1] > dst[1]:
            yield PlanError(
                f"{edge.dst} is listed before {edge.src} in a slot of {dag.slots[src[0]].group}.",
                help="list members of a slot after what they read; complete the plan.",
                edge=edge,
            )


def forgotten_microbatches(checked: Checked) -> Iterator[PlanError]:
    """Passes that the directed order names for some microbatches and not for others."""
    dag = checked.dag
    named = {node for slot in checked.slots for node in slot.nodes}
    orders: dict[tuple[str, str, str], tuple[list[NodeId], list[NodeId]]] = {}
    for name, node in dag.nodes.items():
        if isinstance(node, Compute):
            key = (name.op, "B" if name.PASS == "BI" else name.PASS or "", node.group or "")
            listed, left_out = orders.setdefault(key, ([], []))
            (listed if name in named else left_out).append(name)
    for (_, _, group), (listed, left_out) in orders.items():
        if listed and left_out:
            yield PlanError(
                f"the order of {group} leaves out {left_out[0]}.",
                detail=(f"it names {listed[0]}" + (f" and {len(listed) - 1} more" if len(listed) > 1 else ""),),
                help="list this pass for every microbatch, or for none.",
                left_out=left_out[0],
                node=listed[0],
            )
