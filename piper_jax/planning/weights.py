"""The weight of a weighted loss: known before the first backward, from the batch alone."""

from __future__ import annotations

from dataclasses import replace

from piper_jax.ir.dag import Dag
from piper_jax.ir.device_groups import REPLICA_AXES, axis_size
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, DataEdge, Node, Value


def with_weights(dag: Dag) -> Dag:
    """Adds one all_reduce of the weight, over all microbatches and replicas, on each group that divides by it. ::

    B[MB=0] head, B[MB=1] head  -->  all_reduce weight g3 --> B[MB=0] head, B[MB=1] head
    """
    readers: dict[str, list[NodeId]] = {}
    for name, node in dag.nodes.items():
        if isinstance(node, Compute) and name.PASS != "F" and dag.ops[name.op].needs_weight:
            readers.setdefault(node.group or "", []).append(name)
    nodes: dict[NodeId, Node] = {}
    data: list[DataEdge] = []
    for group, found in readers.items():
        axes = tuple(a for a in REPLICA_AXES if axis_size(dag.groups[group], (a,)) > 1)
        if axes:
            node = NodeId(f"all_reduce weight {group}", "F")
            nodes[node] = Collective(id=node, group=group, kind="all_reduce", axes=axes, values=("weight",))
            data += [DataEdge(node, reader, ("weight",)) for reader in found]
    if not nodes:
        return dag
    values = {**dag.values, "weight": Value(name="weight", nbytes=4)}
    return replace(dag, nodes={**nodes, **dag.nodes}, data=(*data, *dag.data), values=values)
