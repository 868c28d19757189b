"""Collectives that join compute slots of their group, so that they may run beside compute that does not need them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.ids import NodeId
from piper_jax.ir.linear import linearize
from piper_jax.ir.nodes import Compute


def compute_slots(dag: Dag) -> dict[str, list[Slot]]:
    """For each group the slots that compute, in its order."""
    return {
        name: [slot for slot in slots if any(isinstance(dag.nodes[node], Compute) for node in slot.nodes)]
        for name, slots in linearize(dag).items()
    }


def with_joined(
    dag: Dag,
    orders: Mapping[str, Sequence[Slot]],
    joined: Mapping[tuple[str, int], Sequence[NodeId]],
    named: Collection[str],
) -> Dag:
    """The DAG with nodes in front of the members of the slots that they join.

    Args:
      orders: what :func:`compute_slots` gave.
      joined: nodes by group and position in its order.
      named: groups all of whose compute slots are named, so that they keep their order.
    """
    slots = [
        Slot(group=group, nodes=(*joined.get((group, i), ()), *slot.nodes))
        for group in dag.groups
        if group in named
        for i, slot in enumerate(orders[group])
    ]
    return replace(dag, slots=(*(slot for slot in dag.slots if slot.group not in named), *slots))
