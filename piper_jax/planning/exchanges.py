"""The all_to_alls around experts that are sharded over a mesh axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from piper_jax.ir.dag import Dag
from piper_jax.ir.device_groups import axis_size
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, DataEdge, Node


def with_exchanges(dag: Dag) -> Dag:
    """Adds one all_to_all on the tensors that enter each sharded operation and one on those that leave it.

    Forward and backward, not BW; in the slot of the operation. What stays on the device (residuals, gradients) passes
    straight. ::

        F gate --> F experts --> F combine
        -->  F gate --> all_to_all enter experts --> F experts --> all_to_all leave experts --> F combine
    """
    around = {
        name: (_exchange_id(name, "enter"), _exchange_id(name, "leave"))
        for name, node in dag.nodes.items()
        if isinstance(node, Compute) and _is_exchanged(dag, node)
    }
    if not around:
        return dag
    moved: dict[NodeId, dict[str, None]] = {}
    data: dict[tuple[NodeId, NodeId], dict[str, None]] = {}
    for edge in dag.data:
        path = [edge.src, edge.dst]
        if edge.src in around and _leaves(edge):
            path.insert(1, around[edge.src][1])
        if edge.dst in around and _leaves(edge):
            path.insert(-1, around[edge.dst][0])
        for src, dst in pairwise(path):
            data.setdefault((src, dst), {}).update(dict.fromkeys(edge.values))
        for collective in path[1:-1]:
            moved.setdefault(collective, {}).update(dict.fromkeys(edge.values))
    nodes: dict[NodeId, Node] = {}
    for name, node in dag.nodes.items():
        enter, leave = around.get(name, (None, None))
        for part in (enter, name, leave):
            if part == name:
                nodes[name] = node
            elif part is not None and part in moved:
                nodes[part] = _exchange(dag, node, part, moved[part])
    slots = tuple(replace(slot, nodes=_joined(slot.nodes, around, nodes)) for slot in dag.slots)
    edges = tuple(DataEdge(src, dst, tuple(values)) for (src, dst), values in data.items())
    return replace(dag, nodes=nodes, data=edges, slots=slots)


def _exchange_id(node: NodeId, way: str) -> NodeId:
    return node._replace(op=f"all_to_all {way} {node.op}")


def _exchange(dag: Dag, node: Node, name: NodeId, values: Mapping[str, None]) -> Collective:
    op = dag.ops[node.id.op]
    axis = op.shard_axis or ""
    return Collective(
        id=name, group=node.group, stream=op.shard_stream, kind="all_to_all", axes=(axis,), values=tuple(values)
    )


def _joined(
    nodes: tuple[NodeId, ...], around: Mapping[NodeId, tuple[NodeId, NodeId]], existing: Mapping[NodeId, Node]
) -> tuple[NodeId, ...]:
    joined: list[NodeId] = []
    for node in nodes:
        enter, leave = around.get(node, (None, None))
        joined += [part for part in (enter, node, leave) if part is not None and part in existing]
    return tuple(joined)


def _is_exchanged(dag: Dag, node: Compute) -> bool:
    op = dag.ops[node.id.op]
    if op.shard_axis in (None, "tensor") or node.id.PASS == "BW" or node.group is None:
        return False
    return axis_size(dag.groups[node.group], (op.shard_axis or "",)) > 1


def _leaves(edge: DataEdge) -> bool:
    """Whether the edge moves dispatched tensors between operations, in one direction of the step."""
    return edge.src.op != edge.dst.op and edge.dst.PASS != "U" and (edge.src.PASS == "F") == (edge.dst.PASS == "F")
