"""Completion: every communication and update of a plan, derived once from the attributes that directives set."""

from __future__ import annotations

from dataclasses import replace

from piper_jax.errors import PlanError
from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Compute, Update
from piper_jax.ir.topology import in_order
from piper_jax.planning.carried import with_carried_state
from piper_jax.planning.exchanges import with_exchanges
from piper_jax.planning.gathers import with_gathers
from piper_jax.planning.reductions import with_reductions_in_slots
from piper_jax.planning.transfers import with_transfers
from piper_jax.planning.updates import with_updates
from piper_jax.planning.weights import with_weights


def complete(dag: Dag) -> Dag:
    """The DAG with its all_to_alls, sends, receives, reductions, updates and gathers, as checked and lowered.

    Directives only set attributes (groups, replication, sharding, slots), and this function is the one place that turns
    them into communication. So no rewrite has to repair what an earlier one inserted. A completed DAG is returned as
    it is.

    Raises:
      PlanError: computation without a group, or state that no collective can keep equal.
    """
    if is_completed(dag):
        return dag
    missing = [name for name, node in dag.nodes.items() if isinstance(node, Compute) and node.group is None]
    if missing:
        raise PlanError(
            f"{len(missing)} nodes have no group yet, the first is {missing[0]}.",
            help=f"call plan.place(where(PP={missing[0].PP}), group=...), or plan.apply(strategy).",
        )
    for step in (
        with_exchanges, with_transfers, with_weights, with_carried_state, with_updates, with_reductions_in_slots,
        with_gathers,
    ):  # fmt: skip
        dag = step(dag)
    return replace(dag, slots=_sorted_inside(dag))


def is_completed(dag: Dag) -> bool:
    """Whether ``dag`` holds communication, or updates that have a group."""
    return any(
        not isinstance(node, Compute) and not (isinstance(node, Update) and node.group is None)
        for node in dag.nodes.values()
    )


def _sorted_inside(dag: Dag) -> tuple[Slot, ...]:
    """The slots, their members in an order that their edges allow."""
    together = {node: i for i, slot in enumerate(dag.slots) if len(slot.nodes) > 1 for node in slot.nodes}
    if not together:
        return dag.slots
    inside: dict[int, list[tuple[NodeId, NodeId]]] = {}
    for edge in (*dag.data, *dag.order):
        number = together.get(edge.src)
        if number is not None and together.get(edge.dst) == number:
            inside.setdefault(number, []).append((edge.src, edge.dst))
    return tuple(
        replace(slot, nodes=in_order(slot.nodes, inside[i])) if i in inside else slot
        for i, slot in enumerate(dag.slots)
    )
