"""The checker: every rule catches what it is there for."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from traced_dags import chain, experts, op, tied, traced

import piper_jax as piper
from piper_jax import PlanError, where
from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, DataEdge, DeviceGroup, Leaf, OrderEdge, Recv, Send, Update
from piper_jax.ir.rules import RULES, check, rules_text

DOCS = Path(__file__).resolve().parents[2] / "docs" / "checks.md"


def sound(**options):
    plan = chain(2).split(where(), num_microbatches=2).place(where(PP=0), group=(0, 1)).place(where(PP=1), group=(2, 3))
    return plan.replicate(where(), **options).complete()


def without(dag, name):
    """``dag`` without a node, its edges joined over the gap."""
    sources = [e for e in dag.data if e.dst == name]
    targets = [e for e in dag.data if e.src == name]
    rest = [e for e in dag.data if name not in (e.src, e.dst)]
    bridges = [DataEdge(a.src, b.dst, b.values) for a in sources for b in targets]
    return replace(dag, nodes={n: node for n, node in dag.nodes.items() if n != name}, data=(*rest, *bridges))


def changed(dag, name, **fields):
    return replace(dag, nodes={**dag.nodes, name: replace(dag.nodes[name], **fields)})


def find(dag, text):
    return next(name for name in dag.nodes if str(name) == text)


def broken_rule(dag, **limits):
    with pytest.raises(PlanError) as caught:
        check(dag, **limits)
    assert len(str(caught.value).splitlines()) <= 12
    return caught.value.data["rule"]


def rendezvous(**orders):
    """Groups that exchange in pairs, each in its own order: ``A=("AB", "CA")``."""
    groups = {name: DeviceGroup(name=name, devices=(i,)) for i, name in enumerate(orders)}
    nodes, data = {}, []
    for pair in sorted({pair for listed in orders.values() for pair in listed}):
        src, dst = pair
        source, send, recv = NodeId(f"make {pair}", "U"), NodeId(f"send {pair}"), NodeId(f"recv {pair}")
        nodes[source] = Update(id=source, group=src)
        nodes[send] = Send(id=send, group=src, peer=dst, values=(pair,), match=recv)
        nodes[recv] = Recv(id=recv, group=dst, peer=src, values=(pair,), match=send)
        data += [DataEdge(source, send, (pair,)), DataEdge(send, recv, (pair,))]
    slots = [
        Slot(group=group, nodes=(NodeId(f"{'send' if pair[0] == group else 'recv'} {pair}"),))
        for group, listed in orders.items()
        for pair in listed
    ]
    return Dag(nodes=nodes, data=tuple(data), slots=tuple(slots), groups=groups)


def test_a_sound_plan_passes():
    check(sound())
    check(sound(shard_params=True, reduce_every="microbatch"))


# -- deadlocks ----------
def test_three_groups_lock_up_though_every_pair_agrees():
    dag = rendezvous(A=("AB", "CA"), B=("BC", "AB"), C=("CA", "BC"))
    with pytest.raises(PlanError) as caught:
        check(dag)
    assert str(caught.value) == (
        "deadlock-free: this plan would deadlock: send AB waits for itself.\n"
        "    send AB\n"
        "      -> order recv CA\n"
        "      -> meets send CA\n"
        "      -> order recv BC\n"
        "      -> meets send BC\n"
        "      -> order recv AB\n"
        "      -> meets send AB\n"
        "help: change the order of one of the slots on this cycle."
    )
    check(rendezvous(A=("AB", "CA"), B=("AB", "BC"), C=("BC", "CA")))


def test_three_groups_lock_up_over_collectives_on_pairs_of_them():
    def dag(**orders):
        single = {name: DeviceGroup(name=name, devices=(i,)) for i, name in enumerate("ABC")}
        joint = {
            f"{a}+{b}": DeviceGroup(name=f"{a}+{b}", devices=("ABC".index(a), "ABC".index(b)))
            for a, b in ("AB", "BC", "CA")
        }
        nodes = {
            NodeId(f"all_reduce {a}{b}"): Collective(
                id=NodeId(f"all_reduce {a}{b}"), group=f"{a}+{b}", kind="all_reduce"
            )
            for a, b in ("AB", "BC", "CA")
        }
        slots = tuple(
            Slot(group=group, nodes=(NodeId(f"all_reduce {pair}"),))
            for group, listed in orders.items()
            for pair in listed
        )
        return Dag(nodes=nodes, groups={**single, **joint}, slots=slots)

    assert broken_rule(dag(A=("AB", "CA"), B=("BC", "AB"), C=("CA", "BC"))) == "deadlock-free"
    check(dag(A=("AB", "CA"), B=("AB", "BC"), C=("BC", "CA")))


def test_two_groups_that_disagree_are_told_so():
    assert broken_rule(rendezvous(A=("AB", "BA"), B=("BA", "AB"))) == "same-order"


def test_a_cycle_through_a_fused_slot_is_caught():
    """F of one microbatch and B of it cannot be one program on the first stage: the last stage lies in between."""
    dag = sound()
    slot = Slot(group="d0-1", nodes=(NodeId("layers.0", "F", 0, None, 0), NodeId("layers.0", "B", 0, None, 0)))
    assert broken_rule(replace(dag, slots=(slot,))) == "deadlock-free"


def test_two_slots_that_are_each_sound_may_lock_each_other():
    """Each of two fused slots needs something from inside the other one."""
    ops = [op("a", 0), op("b", 1), op("c", 1), op("d", 0)]
    plan = traced(ops, [("a", "c", "x"), ("b", "d", "y")]).place(where(PP=0), group=0).place(where(PP=1), group=1)
    forward = {name: NodeId(name, "F", pp) for name, pp in (("a", 0), ("b", 1), ("c", 1), ("d", 0))}
    slots = (
        Slot(group="d0", nodes=(forward["a"], forward["d"])),
        Slot(group="d1", nodes=(forward["c"], forward["b"])),
    )
    check(plan.complete())
    assert broken_rule(replace(plan.complete(), slots=slots)) == "deadlock-free"


def test_members_of_one_slot_that_wait_for_each_other_are_caught():
    dag = sound()
    one, other = NodeId("layers.0", "F", 0, None, 0), NodeId("layers.0", "F", 0, None, 1)
    dag = replace(
        dag,
        slots=(Slot(group="d0-1", nodes=(one, other)),),
        order=(OrderEdge(one, other, "test"), OrderEdge(other, one, "test")),
    )
    assert broken_rule(dag) == "deadlock-free"


# -- everything else ----------
def test_edges_name_nodes():
    dag = sound()
    assert broken_rule(replace(dag, data=(*dag.data, DataEdge(NodeId("x"), NodeId("y"), ("v",))))) == "known-names"


def test_nodes_name_groups_of_the_plan():
    assert broken_rule(changed(sound(), find(sound(), "U update d0-1"), group="nowhere")) == "known-names"


def test_a_missing_operation_is_caught():
    dag = sound()
    assert broken_rule(without(dag, find(dag, "F[PP=1,MB=1] layers.1"))) == "placed-once"


def test_an_operation_with_whole_and_half_backward_is_caught():
    dag = sound()
    extra = NodeId("layers.1", "BI", 1, None, 1)
    assert broken_rule(replace(dag, nodes={**dag.nodes, extra: Compute(id=extra, group="d2-3")})) == "placed-once"


def test_a_microbatch_beyond_the_last_is_caught():
    dag = sound()
    extra = NodeId("layers.1", "F", 1, None, 7)
    assert broken_rule(replace(dag, nodes={**dag.nodes, extra: Compute(id=extra, group="d2-3")})) == "placed-once"


def test_a_backward_away_from_its_forward_is_caught():
    plan = chain(1).place(where(PASS="F"), group=0).place(where(PASS="B"), group=1)
    assert broken_rule(plan.complete()) == "backward-with-forward"


def test_a_node_in_two_slots_is_caught():
    dag = sound()
    slot = Slot(group="d0-1", nodes=(NodeId("layers.0", "F", 0, None, 0),))
    assert broken_rule(replace(dag, slots=(slot, slot))) == "sound-slots"


def test_a_slot_of_another_group_is_caught():
    slot = Slot(group="d2-3", nodes=(NodeId("layers.0", "F", 0, None, 0),))
    assert broken_rule(replace(sound(), slots=(slot,))) == "sound-slots"


@pytest.mark.parametrize(
    "fields",
    [
        {"match": NodeId("layers.0", "F", 0, None, 0)},
        {"values": ("another",)},
        {"match": NodeId("recv layers.0>d2-3", "F", 0, None, 1)},
    ],
)
def test_a_send_without_its_receive_is_caught(fields):
    dag = sound()
    assert broken_rule(changed(dag, find(dag, "F[PP=0,MB=0] send layers.0>d2-3"), **fields)) == "matched-transfers"


def test_a_missing_send_is_caught():
    dag = sound()
    assert broken_rule(without(dag, find(dag, "F[PP=0,MB=0] send layers.0>d2-3"))) == "matched-transfers"


def test_a_value_that_nothing_carries_is_caught():
    dag = sound()
    dag = without(
        without(dag, find(dag, "F[PP=0,MB=0] send layers.0>d2-3")), find(dag, "F[PP=0,MB=0] recv layers.0>d2-3")
    )
    assert broken_rule(dag) == "values-arrive"


def test_a_send_without_what_it_sends_is_caught():
    dag = sound()
    send = find(dag, "F[PP=0,MB=0] send layers.0>d2-3")
    assert broken_rule(replace(dag, data=tuple(e for e in dag.data if e.dst != send))) == "values-complete"


def test_a_microbatch_that_reads_less_than_others_is_caught():
    dag = sound()
    reader = find(dag, "F[PP=1,MB=1] layers.1")
    assert broken_rule(replace(dag, data=tuple(e for e in dag.data if e.dst != reader))) == "values-complete"


def test_an_axis_that_the_group_lacks_is_caught():
    plan = chain(1).place(where(), group=(0, 1)).replicate(where(), axes=("data", "expert"))
    assert broken_rule(plan.complete()) == "known-axes"


def divided_experts(**expert):
    """One expert region over an expert axis of two devices."""
    dag = experts(1).dag
    buckets = {**dag.buckets, "layers.0.experts": replace(dag.buckets["layers.0.experts"], **expert)}
    group = DeviceGroup(name="g0", devices=(0, 1), axes=(("data", 1), ("expert", 2)))
    plan = replace(experts(1), dag=replace(dag, buckets=buckets)).place(where(), group=group)
    return plan.shard(where(EP=...)).replicate(where(), axes=("data", "expert")).complete()


@pytest.mark.parametrize(
    ("count", "fix"),
    [(1, "1 expert of .*\n.*expert_parallel=1."), (9, "9 experts of .*\n.*expert_parallel=1, 3 or 9.")],
)
def test_the_degrees_that_divide_experts_are_named(count, fix):
    leaf = Leaf(path="w", shape=(count, 8), dtype="float32", kind="trainable", nbytes=4)
    with pytest.raises(PlanError, match=fix):
        check(divided_experts(leaves=(leaf,)))


@pytest.mark.parametrize("shapes", [((3, 8),), ((4, 8), (8,)), ((),)], ids=str)
def test_experts_without_an_equal_part_for_each_device_are_caught(shapes):
    leaves = tuple(
        Leaf(path=f"w{k}", shape=shape, dtype="float32", kind="trainable", nbytes=4) for k, shape in enumerate(shapes)
    )
    assert broken_rule(divided_experts(leaves=leaves)) == "experts-divide"


def test_experts_that_others_read_whole_are_caught():
    leaf = Leaf(path="w", shape=(4, 8), dtype="float32", kind="trainable", nbytes=128)
    dag = divided_experts(leaves=(leaf,))
    check(dag)
    gate = dag.ops["layers.0.gate"]
    ops = {**dag.ops, gate.name: replace(gate, reads=(*gate.reads, "layers.0.experts"))}
    assert broken_rule(replace(dag, ops=ops)) == "experts-divide"


def test_copies_that_nothing_reduces_are_caught():
    assert broken_rule(chain(1).place(where(), group=(0, 1)).complete()) == "replicas-agree"


def test_an_owner_that_does_not_update_is_caught():
    dag = tied(2).place(where(PP=0), group=0).place(where(PP=1), group=1).complete()
    assert broken_rule(changed(dag, find(dag, "U update d1"), buckets=("layers.1",))) == "updated-on-every-owner"


def test_an_update_that_happens_twice_is_caught():
    dag = sound()
    again = NodeId("update again", "U")
    nodes = {**dag.nodes, again: Update(id=again, group="d0-1", buckets=("layers.0",))}
    assert broken_rule(replace(dag, nodes=nodes)) == "updated-on-every-owner"


def test_a_gradient_that_misses_its_reduction_is_caught():
    dag = sound()
    lost = find(dag, "B[PP=0,MB=1] layers.0")
    data = tuple(e for e in dag.data if not (e.src == lost and "all_reduce" in e.dst.op))
    moved = DataEdge(lost, find(dag, "U update d0-1"), ("gradient layers.0",))
    assert broken_rule(replace(dag, data=(*data, moved))) == "updated-on-every-owner"


def test_parameters_read_after_they_are_freed_are_caught():
    dag = sound(shard_params=True)
    reader = find(dag, "B[PP=0,MB=1] layers.0")
    data = tuple(e for e in dag.data if not (e.dst == reader and "all_gather" in e.src.op))
    assert broken_rule(replace(dag, data=data)) == "nothing-read-after-free"


def test_rows_that_do_not_divide_by_replicas_are_caught():
    plan = chain(1, rows=12).split(where(), num_microbatches=3).place(where(), group=tuple(range(8)))
    traced_values = traced([op("a", 0), op("b", 0)], [("a", "b", "x")], rows=12).place(where(), group=tuple(range(8)))
    check(plan.replicate(where()).complete())
    assert broken_rule(traced_values.replicate(where()).complete()) == "batch-divides"


def test_memory_beyond_the_limit_is_caught():
    plan = chain(2).place(where(), group=0)
    plan.check(memory_limit=10**9)
    with pytest.raises(PlanError, match="fits-in-memory"):
        plan.check(memory_limit=20_000)
    assert broken_rule(sound(), memory_limit=10, peak_bytes={"d0-1": 11}) == "fits-in-memory"


def test_a_device_in_two_groups_is_caught():
    dag = sound()
    groups = {name: replace(group, devices=(0, 1)) for name, group in dag.groups.items()}
    assert broken_rule(replace(dag, groups=groups)) == "disjoint-groups"


# -- the list itself ----------
def test_every_rule_has_its_words_and_a_name_of_its_own():
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule.text.endswith(".")
        assert rule.why.endswith(".")
        assert rule.anchor == f"docs/checks.md#{rule.name}"


def test_the_documentation_lists_the_rules():
    assert rules_text() in DOCS.read_text()


def test_check_chains_and_the_public_plan_is_checked_whole():
    plan = chain(4).apply(piper.Strategy(pipeline_parallel=4, data_parallel=2))
    assert plan.check() is plan


# -- whole orders ----------
def ordered(*microbatches):
    tasks = ((0, "F"), (1, "F"), (1, "B"), (0, "B"))
    slots = [where(PP=pp, MB=mb, PASS=p) for pp, p in tasks for mb in microbatches]
    return chain(2, rows=12).split(where(), num_microbatches=3).place(where(), group=0).order(slots)


def test_a_forgotten_microbatch_is_named():
    ordered(0, 1, 2).check()
    with pytest.raises(PlanError) as caught:
        ordered(0, 1).check()
    assert re.sub(r"py:\d+", "py:LINE", str(caught.value)) == (
        "whole-orders: order[2] at test_rules.py:LINE: the order of d0 leaves out F[PP=0,MB=2] layers.0.\n"
        "    it names F[PP=0,MB=0] layers.0 and 1 more\n"
        "help: list this pass for every microbatch, or for none."
    )


def test_a_forgotten_microbatch_is_named_where_completion_names_the_rest():
    plan = chain(1).split(where(), num_microbatches=3).place(where(), group=(0, 1))
    plan = plan.replicate(where(), shard_params=True, reduce_every="microbatch")
    plan.order([where(PASS="F", MB=mb) for mb in range(3)]).check()
    with pytest.raises(PlanError, match="leaves out F"):
        plan.order([where(PASS="F", MB=mb) for mb in range(2)]).check()
