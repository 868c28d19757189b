"""Gradient reductions on a stream of their own run beside the compute that follows their last gradient."""

from __future__ import annotations

from piper_jax.ir.dag import Dag
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective
from piper_jax.planning.joining import compute_slots, with_joined


def with_overlapped_reductions(dag: Dag) -> Dag:
    """Joins each reduction whose ``reduce_stream`` is not that of the compute to the next compute slot of its group.

    Those after the last compute of their group stay alone. ::

        g0: B[MB=0] | reduce_scatter gradient[MB=0] | B[MB=1] | reduce_scatter gradient[MB=1]
        -->  B[MB=0] | B[MB=1] with reduce_scatter gradient[MB=0] | reduce_scatter gradient[MB=1]
    """
    wanted = {
        name
        for name, node in dag.nodes.items()
        if isinstance(node, Collective) and name.PASS == "B" and node.kind in ("all_reduce", "reduce_scatter")
        if node.stream != "compute" and "+" not in (node.group or "")
    }
    if not wanted:
        return dag
    orders = compute_slots(dag)
    position = {node: i for slots in orders.values() for i, slot in enumerate(slots) for node in slot.nodes}
    last: dict[NodeId, int] = {}
    for edge in dag.data:
        if edge.dst in wanted:
            last[edge.dst] = max(last.get(edge.dst, 0), position[edge.src])
    joined: dict[tuple[str, int], list[NodeId]] = {}
    for name, after in last.items():
        group = dag.nodes[name].group or ""
        if after + 1 < len(orders[group]):
            joined.setdefault((group, after + 1), []).append(name)
    return with_joined(dag, orders, joined, {group for group, _ in joined})
