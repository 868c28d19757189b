"""Gradient reductions within a step are members of slots: of that of their last gradient, or of the next one."""

from __future__ import annotations

from piper_jax.ir.dag import Dag
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective
from piper_jax.planning.joining import compute_slots, with_joined


def with_reductions_in_slots(dag: Dag) -> Dag:
    """Joins reductions to compute slots of their group.

    One of a span of microbatches joins the slot of its last gradient, so that whole gradients are gone when that
    program ends. One whose ``reduce_stream`` is not that of the compute joins the next slot, which may hide it; after
    the last compute it stays alone. ::

        g0: B[MB=0] | reduce_scatter gradient[MB=0] | B[MB=1] | reduce_scatter gradient[MB=1]
        -->  B[MB=0] with reduce_scatter gradient[MB=0] | B[MB=1] with reduce_scatter gradient[MB=1]
        -->  B[MB=0] | B[MB=1] with reduce_scatter gradient[MB=0] | reduce_scatter gradient[MB=1]
    """
    wanted = {
        name: 0 if node.stream == "compute" else 1
        for name, node in dag.nodes.items()
        if isinstance(node, Collective) and name.PASS == "B" and node.kind in ("all_reduce", "reduce_scatter")
        if (node.stream != "compute" or name.MB is not None) and "+" not in (node.group or "")
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
        if after + wanted[name] < len(orders[group]):
            joined.setdefault((group, after + wanted[name]), []).append(name)
    return with_joined(dag, orders, joined, {group for group, _ in joined})
