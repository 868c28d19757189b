"""The all_to_alls around experts that are sharded over a mesh axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from piper_jax.ir.dag import Dag
from piper_jax.ir.device_groups import axis_size
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, DataEdge, Node, Way


@dataclass(frozen=True, slots=True)
class _Around:
    """The exchanges of one sharded node, with the values that each moves: sizes first, then the tokens."""

    enter: dict[NodeId, dict[str, None]] = field(default_factory=dict)
    leave: dict[NodeId, dict[str, None]] = field(default_factory=dict)


def with_exchanges(dag: Dag) -> Dag:
    """Adds one all_to_all on the tensors that enter each sharded operation and one on those that leave it.

    Forward and backward, not BW; in the slot of the operation. What stays on the device (residuals, gradients) passes
    straight. How many rows there are of each expert is moved by an exchange of its own, before the rows. ::

        F gate --> F experts --> F combine
        -->  F gate --> all_to_all enter experts --> F experts --> all_to_all leave experts --> F combine
    """
    around = {
        name: _Around() for name, node in dag.nodes.items() if isinstance(node, Compute) and _is_exchanged(dag, node)
    }
    if not around:
        return dag
    data: dict[tuple[NodeId, NodeId], dict[str, None]] = {}
    for edge in dag.data:
        for value in edge.values:
            path = [edge.src, edge.dst]
            if edge.src in around and _leaves(edge):
                path.insert(1, _moved(dag, around[edge.src].leave, edge.src, "leave", value))
            if edge.dst in around and _leaves(edge):
                path.insert(-1, _moved(dag, around[edge.dst].enter, edge.dst, "enter", value))
            for src, dst in pairwise(path):
                data.setdefault((src, dst), {})[value] = None
    nodes: dict[NodeId, Node] = {}
    for name, node in dag.nodes.items():
        for part in _parts(name, around):
            nodes[part] = node if part == name else _exchange(dag, node, part, around[name])
    data.update(_after_sizes(dag, around))
    slots = tuple(replace(slot, nodes=_in_turn(slot.nodes, around)) for slot in dag.slots)
    edges = tuple(DataEdge(src, dst, tuple(values)) for (src, dst), values in data.items())
    return replace(dag, nodes=nodes, data=edges, slots=slots)


def _moved(dag: Dag, found: dict[NodeId, dict[str, None]], node: NodeId, way: Way, value: str) -> NodeId:
    """The exchange that moves a value, which is added to it."""
    what = "sizes " if _is_sizes(dag, node, value) else ""
    name = node._replace(op=f"all_to_all {what}{way} {node.op}")
    found.setdefault(name, {})[value] = None
    return name


def _is_sizes(dag: Dag, node: NodeId, value: str) -> bool:
    """Whether a value says how many rows are of each expert."""
    known = dag.values.get(value)
    bounded = dag.ops[node.op].row_bound is not None
    vector = known is not None and len(known.shape) == 1 and known.batch_dim is None and "int" in known.dtype
    return bounded and vector


def _parts(name: NodeId, around: Mapping[NodeId, _Around]) -> Sequence[NodeId]:
    found = around.get(name)
    if found is None:
        return (name,)
    return (*sorted(found.enter, key=_is_payload), name, *found.leave)


def _in_turn(members: Sequence[NodeId], around: Mapping[NodeId, _Around]) -> tuple[NodeId, ...]:
    """The members of a slot with their exchanges; passes of different microbatches take turns.

    Collectives of a program follow each other in this order, so that each of one pass can run beside the compute of
    the other. Backward passes begin: they have no matrix product before their first exchange, and a forward has. ::

        F dense, F enter, F experts, F leave, B combine, B enter, B experts, B leave
        -->  B combine, F dense, B enter, F enter, B experts, F experts, B leave, F leave
    """
    passes: dict[tuple[bool, int | None], list[NodeId]] = {}
    for node in members:
        passes.setdefault((node.PASS == "F", node.MB), []).extend(_parts(node, around))
    if all(node not in around for node in members):
        return tuple(members)
    ranked = [
        ((k + 0.5) / len(found), turn, node)
        for turn, (_, found) in enumerate(sorted(passes.items(), key=lambda item: item[0][0]))
        for k, node in enumerate(found)
    ]
    return tuple(node for _, _, node in sorted(ranked, key=lambda item: item[:2]))


def _is_payload(name: NodeId) -> bool:
    return not name.op.startswith("all_to_all sizes")


def _after_sizes(dag: Dag, around: Mapping[NodeId, _Around]) -> dict[tuple[NodeId, NodeId], dict[str, None]]:
    """Rows are packed by how many there are: every exchange of rows reads the sizes too, of the forward pass."""
    found: dict[tuple[NodeId, NodeId], dict[str, None]] = {}
    for name, own in around.items():
        forward = around[name._replace(PASS="F")].enter
        for sizes in (n for n in forward if not _is_payload(n)):
            for rows in (n for n in (*own.enter, *own.leave) if _is_payload(n)):
                found[sizes, rows] = dict(forward[sizes])
    return found


def _exchange(dag: Dag, node: Node, name: NodeId, around: _Around) -> Collective:
    op = dag.ops[node.id.op]
    way: Way = "enter" if name in around.enter else "leave"
    values = around.enter[name] if way == "enter" else around.leave[name]
    return Collective(
        id=name, group=node.group, stream=op.shard_stream, kind="all_to_all", axes=(op.shard_axis or "",),
        values=tuple(values), around=op.name, way=way,
    )  # fmt: skip


def _is_exchanged(dag: Dag, node: Compute) -> bool:
    op = dag.ops[node.id.op]
    if op.shard_axis is None or node.id.PASS == "BW" or node.group is None:
        return False
    return axis_size(dag.groups[node.group], (op.shard_axis or "",)) > 1


def _leaves(edge: DataEdge) -> bool:
    """Whether the edge moves dispatched tensors between operations, in one direction of the step."""
    return edge.src.op != edge.dst.op and edge.dst.PASS != "U" and (edge.src.PASS == "F") == (edge.dst.PASS == "F")
