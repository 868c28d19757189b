"""Random legal directive programs: what must hold for every one of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from traced_dags import op, traced

from piper_jax import where
from piper_jax.ir.encoding import dag_data
from piper_jax.ir.filters import Filter, Where
from piper_jax.ir.ids import NodeId
from piper_jax.ir.linear import dispatch_order, linearize
from piper_jax.ir.nodes import Collective, Compute, DeviceGroup, Recv, Send, Update
from piper_jax.ir.ownership import ownerships
from piper_jax.planning import Plan, complete, plan_from_json, plan_json
from piper_jax.primitives.balance import balanced_stages

FEW = settings(max_examples=60, deadline=None)


@st.composite
def models(draw) -> Plan:
    """A chain of units with skips, tied and frozen state, now and then an expert region or a backward in one piece.

    Some state is not updated element by element, as by adafactor.
    """
    num_units = draw(st.integers(1, 6))
    ops, flows, last = [], [], None
    for i in range(num_units):
        reads = (f"layers.{i}", "tied") if draw(st.booleans()) else (f"layers.{i}",)
        names = ["in", "experts", "out"] if draw(st.integers(0, 3)) == 0 else ["all"]
        for name in names:
            full = f"layers.{i}.{name}"
            state = (f"{full}.kernel",) if name == "experts" else reads
            flops = draw(st.integers(0, 100))
            fields = {"flops_forward": flops, "splittable": draw(st.integers(0, 4)) > 0}
            ops.append(op(full, i, EP=0 if name == "experts" else None, reads=state, **fields))
            if last is not None:
                flows.append((last, full, f"v.{last}"))
            last = full
    firsts = [o.name for o in ops if o.EP is None]
    if len(firsts) > 2 and draw(st.booleans()):
        flows.append((firsts[0], firsts[-1], "skip"))
    frozen = ("layers.0",) if draw(st.booleans()) else ()
    plan = traced(ops, flows, frozen=frozen, couplings=draw(st.integers(0, 2)))
    whole = draw(st.integers(1, 4))
    buckets = {name: replace(b, elementwise=k % 4 < whole) for k, (name, b) in enumerate(plan.dag.buckets.items())}
    return replace(plan, dag=replace(plan.dag, buckets=buckets))


@st.composite
def placed(draw) -> Plan:
    """Cut, split and placed: stages in any arrangement on groups, microbatches perhaps both ways."""
    plan = draw(models())
    num_units = plan.num_stages
    plan = plan.cut(stages=draw(st.integers(1, num_units)))
    num_microbatches = draw(st.sampled_from([1, 2, 4]))
    plan = plan.split(where(), num_microbatches=num_microbatches)
    num_groups = draw(st.integers(1, 3))
    axes = draw(st.sampled_from([(("data", 1), ("expert", 1)), (("data", 2), ("expert", 2))]))
    size = axes[0][1] * axes[1][1]
    groups = [
        DeviceGroup(name=f"g{i}", devices=tuple(range(i * size, (i + 1) * size)), axes=axes) for i in range(num_groups)
    ]
    two_way = num_microbatches > 1 and draw(st.booleans())
    for stage in range(plan.num_stages):
        if two_way:
            half = num_microbatches // 2
            for part in (range(half), range(half, num_microbatches)):
                plan = plan.place(where(PP=stage, MB=part), group=draw(st.sampled_from(groups)))
        else:
            plan = plan.place(where(PP=stage), group=draw(st.sampled_from(groups)))
    return plan


@st.composite
def attributes(draw) -> list[tuple[str, Where, dict[str, object]]]:
    """Directives that only set attributes: name, filter and arguments."""
    zero = draw(
        st.sampled_from(
            [
                {},
                {"shard_optimizer": True},
                {"shard_grads": True, "reduce_every": draw(st.sampled_from(["step", "microbatch", 2, 3]))},
                {"shard_params": True, "reduce_every": "microbatch", "gather_distance": draw(st.integers(0, 3))},
            ]
        )
    )
    bucket_bytes = draw(st.sampled_from([None, 1, 3 * 4096]))
    gathered = {"gather_stream": "gather"} if zero else {}
    streams = draw(st.sampled_from([{}, {"reduce_stream": "reduce", **gathered}]))
    found: list[tuple[str, Where, dict[str, object]]] = [
        ("replicate", where(), {"axes": ("data", "expert"), "bucket_bytes": bucket_bytes, **zero, **streams})
    ]
    if draw(st.booleans()):
        found.append(("remat", where(PP=0), {"policy": "nothing_saveable"}))
    return found


def with_attributes(plan: Plan, directives: list[tuple[str, Where, dict[str, object]]], sharded: bool) -> Plan:
    for name, filter, arguments in directives:
        plan = getattr(plan, name)(filter, **arguments)
    if sharded and any(o.EP is not None for o in plan.dag.ops.values()):
        plan = plan.shard(where(EP=...))
    return plan


def random_slots(plan: Plan, random: Random) -> list[Filter | tuple[Filter, ...]]:
    """All computation in a random topological order, some backwards in halves, some neighbours fused."""
    halves = {node for node in plan.dag.nodes if node.PASS == "B" and random.random() < 0.3}
    passes: dict[NodeId, tuple[str, ...]] = {
        name: ("BI", "BW") if name in halves else (str(name.PASS),)
        for name, node in plan.dag.nodes.items()
        if isinstance(node, Compute)
    }
    before: dict[NodeId, set[NodeId]] = {name: set() for name in passes}
    for edge in plan.dag.data:
        if edge.dst in before:
            before[edge.dst].add(edge.src)
    done: set[NodeId] = set()
    late: list[tuple[NodeId, Where]] = []
    sequence: list[tuple[NodeId, Where]] = []
    while len(done) < len(passes) or late:
        ready = [name for name in passes if name not in done and before[name] <= done]
        if late and (not ready or random.random() < 0.3):
            sequence.append(late.pop(random.randrange(len(late))))
            continue
        name = random.choice(ready)
        done.add(name)
        first, *rest = [where(name.op, PP=name.PP, MB=name.MB, PASS=PASS) for PASS in passes[name]]
        sequence.append((name, first))
        late += [(name, filter) for filter in rest]
    slots: list[Filter | tuple[Filter, ...]] = []
    groups: list[str | None] = []
    for name, filter in sequence:
        group = plan.dag.nodes[name].group
        if groups and groups[-1] == group and random.random() < 0.4:
            last = slots[-1]
            slots[-1] = (*(last if isinstance(last, tuple) else (last,)), filter)
        else:
            slots.append(filter)
            groups.append(group)
    return slots


def some_passes(plan: Plan, slots: list[Filter | tuple[Filter, ...]], random: Random) -> list[Filter]:
    """Some passes of some operations in all microbatches, none fused: what is left out may lie between them.

    Where a backward stays whole, its BW is not named without its BI.
    """
    keep: dict[tuple[object, str], bool] = {}

    def is_kept(filter: Filter) -> bool:
        assert isinstance(filter, Where)
        assert filter.PASS is not None
        assert filter.path is not None
        splits = plan.dag.ops[filter.path[0]].splittable
        name = "B" if filter.PASS == ("BI",) or (filter.PASS == ("BW",) and not splits) else filter.PASS[0]
        return keep.setdefault((filter.path, name), random.random() < 0.5)

    listed = [filter for slot in slots for filter in (slot if isinstance(slot, tuple) else (slot,))]
    return [filter for filter in listed if is_kept(filter)]


@st.composite
def programs(draw) -> Plan:
    """A whole legal program: placed, ordered (perhaps only some passes), with attributes."""
    plan, sharded = draw(placed()), draw(st.booleans())
    random = Random(draw(st.integers(0, 10**6)))
    slots = random_slots(plan, random)
    kept = slots if draw(st.booleans()) else some_passes(plan, slots, random)
    directives = draw(attributes())
    if draw(st.booleans()):
        return with_attributes(plan.order(kept), directives, sharded)
    return with_attributes(plan, directives, sharded).order(kept)


@FEW
@given(programs())
def test_every_legal_program_passes_the_checker(plan):
    plan.check()


@FEW
@given(programs())
def test_json_and_replay_give_the_same_plan(plan):
    again = plan_from_json(plan_json(plan))
    assert again == plan
    assert plan_json(again) == plan_json(plan)
    assert complete(again.dag) == plan.complete()


@FEW
@given(placed(), attributes(), st.integers(0, 10**6), st.booleans())
def test_attributes_commute_with_order(plan, directives, seed, sharded):
    slots = random_slots(plan, Random(seed))
    one = with_attributes(plan.order(slots), directives, sharded)
    other = with_attributes(plan, directives, sharded).order(slots)
    assert dag_data(one.dag) == dag_data(other.dag)


@FEW
@given(programs())
def test_orders_keep_edges_and_slots_and_hold_every_node_once(plan):
    dag = plan.complete()
    order = [node for slot in dispatch_order(dag) for node in slot.nodes]
    assert len(order) == len(set(order)) == len(dag.nodes)
    position = {node: i for i, node in enumerate(order)}
    assert all(position[edge.src] < position[edge.dst] for edge in (*dag.data, *dag.order))
    for group, slots in linearize(dag).items():
        positions = [position[node] for slot in slots for node in slot.nodes]
        assert positions == sorted(positions)
        named = [slot.nodes for slot in dag.slots if slot.group == group]
        assert [slot.nodes for slot in slots if slot.nodes in set(named)] == named


@FEW
@given(programs())
def test_forward_maps_lead_to_nodes_of_the_plan(plan):
    traced_nodes = [name for name in plan.forward.changed if name.MB is None and name.PASS in ("F", "B")]
    reached = [node for name in traced_nodes for node in plan.forward(name)]
    assert set(reached) <= set(plan.dag.nodes)
    computed = {name for name, node in plan.dag.nodes.items() if isinstance(node, Compute)}
    assert computed <= set(reached)


@FEW
@given(programs())
def test_each_group_receives_from_each_producer_at_most_once(plan):
    dag = plan.complete()
    sends = [node for node in dag.nodes.values() if isinstance(node, Send)]
    assert len(sends) == sum(isinstance(node, Recv) for node in dag.nodes.values())
    producer = {edge.dst: edge.src for edge in dag.data if isinstance(dag.nodes[edge.dst], Send)}
    assert len({(producer[send.id], send.peer) for send in sends}) == len(sends)


@FEW
@given(programs())
def test_every_trainable_bucket_is_reduced_over_all_its_copies(plan):
    dag = plan.complete()
    reduced: dict[str, set[str | None]] = {}
    for node in dag.nodes.values():
        if isinstance(node, Collective) and node.kind in ("all_reduce", "reduce_scatter"):
            for value in node.values:
                reduced.setdefault(value.removeprefix("gradient "), set()).add(node.group)
    updated = {
        (bucket, node.group) for node in dag.nodes.values() if isinstance(node, Update) for bucket in node.buckets
    }
    for name, owned in ownerships(dag).items():
        assert {owner for bucket, owner in updated if bucket == name} == set(owned.owners)
        has_gradient = any(name in o.reads and o.has_backward for o in dag.ops.values())
        assert reduced.get(name, set()) == ({owned.group.name} if owned.num_copies > 1 and has_gradient else set())


@FEW
@given(models(), st.data())
def test_cut_keeps_all_work_and_all_state(plan, data):
    stages = data.draw(st.integers(1, plan.num_stages))
    after = plan.cut(stages=stages)
    assert after.num_stages == stages
    for field in ("flops_forward", "flops_backward_input", "residual_bytes"):
        assert sum(getattr(o, field) for o in after.dag.ops.values()) == sum(
            getattr(o, field) for o in plan.dag.ops.values()
        )
    assert {b for o in after.dag.ops.values() for b in o.reads} == {b for o in plan.dag.ops.values() for b in o.reads}
    assert {u for o in after.dag.ops.values() for u in o.units} == {u for o in plan.dag.ops.values() for u in o.units}
    after.place(where(), group=0).check()


@FEW
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_the_cut_is_the_best_of_all_cuts(costs, data):
    crossing = data.draw(st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)))
    stages = data.draw(st.integers(1, len(costs)))

    def key(bounds):
        parts = [sum(costs[a:b]) for a, b in pairwise((0, *bounds, len(costs)))]
        return max(parts), sum(crossing[b - 1] for b in bounds), sum(part * part for part in parts)

    parts = balanced_stages(costs, crossing, stages)
    assert [i for part in parts for i in part] == list(range(len(costs)))
    best = min(key(bounds) for bounds in combinations(range(1, len(costs)), stages - 1))
    assert key(tuple(part.start for part in parts[1:])) == best
