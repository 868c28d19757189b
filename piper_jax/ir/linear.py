"""The total order in which each group runs its slots, and the global order in which a runtime dispatches them."""

from __future__ import annotations

from piper_jax.ir.contraction import Contraction, contract
from piper_jax.ir.cycles import cycle_error
from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.device_groups import members_of


def dispatch_order(dag: Dag) -> tuple[Slot, ...]:
    """All slots of all groups in one topological order of the contracted graph.

    A send is directly followed by its receive, as two slots; a collective on a joint group is one slot of that group.
    The order follows the time at which each slot could start were F 2, B 4 and communication 1 long; ties put
    communication first and then keep node order.

    Raises:
      PlanError: the contracted graph has a cycle, which is printed.
    """
    contraction = _acyclic(dag)
    slots = (slot for v in contraction.ranked for slot in contraction.vertices[v])
    return tuple({slot.nodes: slot for slot in slots}.values())


def linearize(dag: Dag) -> dict[str, tuple[Slot, ...]]:
    """For each group of devices, the order in which it runs its slots; of a completed DAG.

    The named slots keep their order. Every other node is a slot of its own, as early as its edges allow; the receives
    of a slot come before it and its sends after it. A slot on a joint group such as ``g0+g3`` stands in the order of
    each of its members, with its own ``group``. The orders are restrictions of :func:`dispatch_order`, so all groups
    agree on the order of what they do together.

    Raises:
      PlanError: the contracted graph has a cycle, which is printed.
    """
    orders: dict[str, list[Slot]] = {name: [] for name in dag.groups if "+" not in name}
    members = {name: members_of(name, dag.groups) for name in dag.groups}
    contraction = _acyclic(dag)
    for vertex in contraction.ranked:
        for slot in contraction.vertices[vertex]:
            for group in members.get(slot.group, ()):
                orders[group].append(slot)
    return {name: tuple(slots) for name, slots in orders.items()}


def _acyclic(dag: Dag) -> Contraction:
    contraction = contract(dag)
    if not contraction.is_acyclic:
        raise cycle_error(dag, contraction)
    return contraction
