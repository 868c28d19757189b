"""A completed plan as integer tables: what the event engine runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piper_jax.errors import PlanError
from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Node, Recv, Send


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Nodes, the slots that group them, and what each slot waits for. Nodes and slots are numbered from 0.

    Attributes:
      nodes, node_slot: the nodes, and the slot of each.
      slots, slot_groups: the nodes of each slot in their order, and the groups that run it.
      successors: for each slot, the slots that wait for its end; one entry for each reason (an edge, a stream).
      num_waits: for each slot, how many such entries name it.
      previous: for each slot, the slots just before it on its streams.
      inner: for each node, the nodes of the same slot that need its result.
    """

    nodes: tuple[Node, ...]
    node_slot: list[int]
    slots: list[tuple[int, ...]]
    slot_groups: list[list[str]]
    successors: list[list[int]]
    num_waits: list[int]
    previous: list[list[int]]
    inner: Mapping[int, tuple[int, ...]]


def program_of(dag: Dag, order: Mapping[str, Sequence[Slot]]) -> Program:
    """Numbers the nodes of a completed ``dag`` and joins its edges with the ``order`` of each group.

    Slots of one group that share a stream run one after another. Streams ``send`` and ``recv`` are one for each peer. A
    slot listed by several groups (a collective over both) is one slot that occupies a stream of each.

    Raises:
      PlanError: a node of the plan is in no slot, or a slot names an unknown node.
    """
    index = {node_id: number for number, node_id in enumerate(dag.nodes)}
    nodes = tuple(dag.nodes.values())
    node_slot, slots, slot_groups, lanes = _number_slots(index, order)
    if -1 in node_slot:
        missing = nodes[node_slot.index(-1)]
        raise PlanError(f"{missing.id} is in the order of no group.", help="place it, or complete the plan first.")
    successors: list[list[int]] = [[] for _ in slots]
    num_waits = [0] * len(slots)
    previous = _chain_streams(nodes, slots, lanes, successors, num_waits)
    inner: dict[int, list[int]] = {}
    for edge in (*dag.data, *dag.order):
        src, dst = index[edge.src], index[edge.dst]
        src_slot, dst_slot = node_slot[src], node_slot[dst]
        if src_slot == dst_slot:
            inner.setdefault(src, []).append(dst)
        else:
            successors[src_slot].append(dst_slot)
            num_waits[dst_slot] += 1
    return Program(
        nodes=nodes, node_slot=node_slot, slots=slots, slot_groups=slot_groups, successors=successors,
        num_waits=num_waits, previous=previous, inner={node: tuple(after) for node, after in inner.items()},
    )  # fmt: skip


def _number_slots(
    index: Mapping[NodeId, int], order: Mapping[str, Sequence[Slot]]
) -> tuple[list[int], list[tuple[int, ...]], list[list[str]], dict[str, list[int]]]:
    """The slot of each node (-1: none), the slots, their groups, and the slots of each group in order."""
    node_slot = [-1] * len(index)
    slots: list[tuple[int, ...]] = []
    slot_groups: list[list[str]] = []
    lanes: dict[str, list[int]] = {}
    for group, group_slots in order.items():
        lane = lanes.setdefault(group, [])
        for slot in group_slots:
            try:
                members = tuple([index[node_id] for node_id in slot.nodes])
            except KeyError as error:
                raise PlanError(
                    f"the order of group {group} names {error.args[0]}, which is not in the plan."
                ) from None
            number = node_slot[members[0]]
            if number < 0:
                number = len(slots)
                slots.append(members)
                slot_groups.append([])
                for member in members:
                    node_slot[member] = number
            slot_groups[number].append(group)
            lane.append(number)
    return node_slot, slots, slot_groups, lanes


def _chain_streams(
    nodes: tuple[Node, ...],
    slots: list[tuple[int, ...]],
    lanes: Mapping[str, Sequence[int]],
    successors: list[list[int]],
    num_waits: list[int],
) -> list[list[int]]:
    """Makes each slot wait for the slots before it on its streams, and returns those."""
    previous: list[list[int]] = [[] for _ in slots]
    for lane in lanes.values():
        last: dict[str, int] = {}
        for slot in lane:
            members = slots[slot]
            streams = {_stream(nodes[member]) for member in members}
            for before in sorted({last[stream] for stream in streams if stream in last}):
                successors[before].append(slot)
                previous[slot].append(before)
                num_waits[slot] += 1
            for stream in streams:
                last[stream] = slot
    return previous


def _stream(node: Node) -> str:
    if isinstance(node, Send | Recv) and node.stream in ("send", "recv"):
        return f"{node.stream} {node.peer}"
    return node.stream
