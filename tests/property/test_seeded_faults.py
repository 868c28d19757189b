"""Faults put into random sound plans: each is caught, and by the rule that is there for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_random_programs import programs

from piper_jax import PlanError
from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.ids import NodeId
from piper_jax.ir.linear import dispatch_order
from piper_jax.ir.nodes import Collective, Compute, DataEdge, Recv, Send, Update
from piper_jax.ir.rules import check

MANY = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)
Fault = Callable[[Dag, Random], Dag | None]


# -- faults: a completed plan -> the same with one fault, or None where it has no place for it ----------
def dropped_edge(dag: Dag, random: Random) -> Dag | None:
    """A value on its way between computation and communication; with one microbatch nothing shows what F reads."""
    ends = (Compute, Send, Recv)
    found = [
        edge
        for edge in dag.data
        if isinstance(dag.nodes[edge.src], ends)
        and isinstance(dag.nodes[edge.dst], ends)
        and (dag.num_microbatches > 1 or not isinstance(dag.nodes[edge.dst], Compute))
    ]
    lost = random.choice(found) if found else None
    return lost and replace(dag, data=tuple(edge for edge in dag.data if edge is not lost))


def dropped_gradient(dag: Dag, random: Random) -> Dag | None:
    """A gradient of one of several microbatches, or an edge from or to an update."""
    found = [
        edge
        for edge in dag.data
        if (isinstance(dag.nodes[edge.dst], Update) or edge.dst.PASS == "U" or edge.values[0].startswith("gradient "))
        and not _serves_update(dag, edge)
        and (not isinstance(dag.nodes[edge.src], Compute) or (dag.num_microbatches > 1 and edge.dst.MB is None))
    ]
    lost = random.choice(found) if found else None
    return lost and replace(dag, data=tuple(edge for edge in dag.data if edge is not lost))


def _serves_update(dag: Dag, edge: DataEdge) -> bool:
    """Whether an edge is from or to a gather of what an update needs whole."""
    return any("all_gather" in end.op and end.PASS == "B" for end in (edge.src, edge.dst))


def dropped_shards(dag: Dag, random: Random) -> Dag | None:
    """An edge from or to a gather of what an update needs whole."""
    found = [edge for edge in dag.data if isinstance(dag.nodes[edge.dst], Update | Collective)]
    found = [edge for edge in found if _serves_update(dag, edge)]
    lost = random.choice(found) if found else None
    return lost and replace(dag, data=tuple(edge for edge in dag.data if edge is not lost))


def crossed_sends(dag: Dag, random: Random) -> Dag | None:
    """Two sends that name each other's receives."""
    sends = [node for node in dag.nodes.values() if isinstance(node, Send)]
    if len(sends) < 2:
        return None
    one, other = random.sample(sends, 2)
    crossed = {one.id: replace(one, match=other.match), other.id: replace(other, match=one.match)}
    return replace(dag, nodes={**dag.nodes, **crossed})


def swapped_sends(dag: Dag, random: Random) -> Dag | None:
    """Two sends to one group in the opposite order of their receives."""
    slots = list(dispatch_order(dag))
    routes: dict[tuple[str | None, str], list[int]] = {}
    for i, slot in enumerate(slots):
        node = dag.nodes[slot.nodes[0]]
        if isinstance(node, Send):
            routes.setdefault((node.group, node.peer), []).append(i)
    several = [places for places in routes.values() if len(places) > 1]
    if not several:
        return None
    i, j = random.sample(random.choice(several), 2)
    slots[i], slots[j] = slots[j], slots[i]
    return replace(dag, slots=tuple(slots))


def reordered_collective(dag: Dag, random: Random) -> Dag | None:
    """Two collectives of one joint group, in the opposite order on one of its members."""
    slots: list[Slot] = []
    for slot in dispatch_order(dag):
        slots += [replace(slot, group=member) for member in slot.group.split("+")]
    places: dict[tuple[str, str | None], list[int]] = {}
    for i, slot in enumerate(slots):
        node = dag.nodes[slot.nodes[0]]
        if isinstance(node, Collective) and node.group != slot.group:
            places.setdefault((slot.group, node.group), []).append(i)
    several = [found for found in places.values() if len(found) > 1]
    if not several:
        return None
    i, j = random.sample(random.choice(several), 2)
    slots[i], slots[j] = slots[j], slots[i]
    return replace(dag, slots=tuple(slots))


def freed_too_early(dag: Dag, random: Random) -> Dag | None:
    """A reader of gathered parameters that does not keep them."""
    kept = [
        edge
        for edge in dag.data
        if isinstance(dag.nodes[edge.dst], Compute)
        and edge.dst.PASS != "BW"
        and getattr(dag.nodes[edge.src], "kind", None) == "all_gather"
    ]
    lost = random.choice(kept) if kept else None
    return lost and replace(dag, data=tuple(edge for edge in dag.data if edge is not lost))


def dropped_reduction(dag: Dag, random: Random) -> Dag | None:
    """A whole all_reduce or reduce_scatter of one group, its gradients going straight to the update."""
    kinds = ("all_reduce", "reduce_scatter")
    return _dropped(dag, random, lambda node: node.kind in kinds and "+" not in str(node.group))


def dropped_gather_of_shards(dag: Dag, random: Random) -> Dag | None:
    """A whole all_gather of updated parameters, or of what an update needs whole."""
    updates = {name for name, node in dag.nodes.items() if isinstance(node, Update)}
    around = {end for e in dag.data if {e.src, e.dst} & updates for end in (e.src, e.dst)}
    return _dropped(
        dag, random, lambda node: node.kind == "all_gather" and node.id in around and "update" not in node.values[0]
    )


def dropped_gather_for_compute(dag: Dag, random: Random) -> Dag | None:
    """A whole all_gather of parameters that are sharded between their uses."""
    readers = {e.src for e in dag.data if isinstance(dag.nodes[e.dst], Compute)}
    return _dropped(dag, random, lambda node: node.kind == "all_gather" and node.id in readers)


def _dropped(dag: Dag, random: Random, wanted: Callable[[Collective], bool]) -> Dag | None:
    found = [name for name, node in dag.nodes.items() if isinstance(node, Collective) and wanted(node)]
    if not found:
        return None
    lost = random.choice(found)
    sources, targets = ([e for e in dag.data if end(e) == lost] for end in (lambda e: e.dst, lambda e: e.src))
    bridges = [DataEdge(a.src, b.dst, a.values) for a in sources for b in targets]
    return replace(
        dag,
        nodes={name: node for name, node in dag.nodes.items() if name != lost},
        data=(*(e for e in dag.data if lost not in (e.src, e.dst)), *bridges),
        order=tuple(e for e in dag.order if lost not in (e.src, e.dst)),
        slots=tuple(replace(s, nodes=tuple(n for n in s.nodes if n != lost)) for s in dag.slots if s.nodes != (lost,)),
    )


def late_gather(dag: Dag, random: Random) -> Dag | None:
    """A slot of parameters that are gathered for the next one, after it."""
    order = list(dispatch_order(dag))
    position = {name: i for i, slot in enumerate(order) for name in slot.nodes}
    found = [
        (position[e.src], position[e.dst])
        for e in dag.data
        if isinstance(dag.nodes[e.dst], Compute)
        and getattr(dag.nodes[e.src], "kind", None) == "all_gather"
        and position[e.src] < position[e.dst]
    ]
    if not found:
        return None
    i, j = random.choice(found)
    order.insert(j, order.pop(i))
    return replace(dag, slots=tuple(replace(s, group=m) for s in order for m in s.group.split("+")))


def late_member(dag: Dag, random: Random) -> Dag | None:
    """Two members of one slot, of which one reads what the other gives, the wrong way round."""
    found = []
    for i, slot in enumerate(dag.slots):
        inside = {name: k for k, name in enumerate(slot.nodes)}
        found += [(i, inside[e.src], inside[e.dst]) for e in dag.data if e.src in inside and e.dst in inside]
    if not found:
        return None
    i, j, k = random.choice(found)
    nodes = list(dag.slots[i].nodes)
    nodes[j], nodes[k] = nodes[k], nodes[j]
    return replace(dag, slots=(*dag.slots[:i], replace(dag.slots[i], nodes=tuple(nodes)), *dag.slots[i + 1 :]))


def placed_twice(dag: Dag, random: Random) -> Dag | None:
    """One pass once more, on any group: as half beside the whole, or as whole beside the halves."""
    backwards = [name for name, node in dag.nodes.items() if isinstance(node, Compute) and name.PASS in ("B", "BI")]
    if not backwards:
        return None
    name = random.choice(backwards)
    again = name._replace(PASS="BI" if name.PASS == "B" else "B")
    group = random.choice([group for group in dag.groups if "+" not in group])
    return replace(dag, nodes={**dag.nodes, again: Compute(id=again, group=group)})


def rendezvous_of_three(dag: Dag, random: Random) -> Dag | None:
    """Three groups that exchange in pairs after all else; every pair agrees, and yet all three wait."""
    groups = [group for group in dag.groups if "+" not in group and any(n.group == group for n in dag.nodes.values())]
    if len(groups) < 3:
        return None
    a, b, c = random.sample(groups, 3)
    nodes, data, slots = dict(dag.nodes), list(dag.data), list(dispatch_order(dag))
    routes = {
        (src, dst): (NodeId(f"send test>{dst}"), NodeId(f"recv test>{dst}")) for src, dst in ((a, b), (b, c), (c, a))
    }
    for (src, dst), (send, recv) in routes.items():
        producer = next(name for name, node in dag.nodes.items() if node.group == src)
        nodes[send] = Send(id=send, group=src, peer=dst, values=("test",), match=recv)
        nodes[recv] = Recv(id=recv, group=dst, peer=src, values=("test",), match=send)
        data += [DataEdge(producer, send, ("test",)), DataEdge(send, recv, ("test",))]
    for group, first, second in ((a, (a, b), (c, a)), (b, (b, c), (a, b)), (c, (c, a), (b, c))):
        slots += [Slot(group=group, nodes=(routes[route][route[0] != group],)) for route in (first, second)]
    return replace(dag, nodes=nodes, data=tuple(data), slots=tuple(slots))


def cycle_through_a_fused_slot(dag: Dag, random: Random) -> Dag | None:
    """One program of two nodes between which another group has to work."""
    after: dict[NodeId, list[NodeId]] = {name: [] for name in dag.nodes}
    for edge in dag.data:
        after[edge.src].append(edge.dst)
    sends = [name for name, node in dag.nodes.items() if isinstance(node, Send)]
    random.shuffle(sends)
    for send in sends:
        group = dag.nodes[send].group
        first = next(edge.src for edge in dag.data if edge.dst == send)
        reached, pending = {send}, [send]
        while pending:
            fresh = [name for name in after[pending.pop()] if name not in reached]
            reached.update(fresh)
            pending += fresh
        last = [
            n for n in dag.nodes if n in reached and isinstance(dag.nodes[n], Compute) and dag.nodes[n].group == group
        ]
        if isinstance(dag.nodes[first], Compute) and last:
            fused = Slot(group=str(group), nodes=(first, random.choice(last)))
            return replace(dag, slots=(fused,))
    return None


FAULTS: list[tuple[Fault, str]] = [
    (dropped_edge, "values-complete"),
    (dropped_gradient, "updated-on-every-owner"),
    (crossed_sends, "matched-transfers"),
    (swapped_sends, "same-order"),
    (reordered_collective, "same-order"),
    (freed_too_early, "nothing-read-after-free"),
    (dropped_reduction, "updated-on-every-owner"),
    (dropped_gather_of_shards, "shards-gathered"),
    (dropped_shards, "shards-gathered"),
    (dropped_gather_for_compute, "nothing-read-after-free"),
    (late_gather, "deadlock-free"),
    (late_member, "members-in-order"),
    (placed_twice, "placed-once"),
    (rendezvous_of_three, "deadlock-free"),
    (cycle_through_a_fused_slot, "deadlock-free"),
]


@pytest.mark.parametrize(("fault", "rule"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_seeded_fault_is_caught_by_its_own_rule(fault: Fault, rule: str) -> None:
    @MANY
    @given(programs(), st.integers(0, 10**6))
    def caught(plan, seed):
        dag = plan.complete()
        check(dag, slots=plan.dag.slots)
        faulty = fault(dag, Random(seed))
        assume(faulty is not None)
        with pytest.raises(PlanError) as error:
            check(faulty, slots=plan.dag.slots)
        assert error.value.data["rule"] == rule

    caught()
