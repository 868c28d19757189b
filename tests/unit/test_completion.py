"""Completion: communication and updates derived from what directives set."""

from __future__ import annotations

from dataclasses import replace

import pytest
from traced_dags import LEAF_BYTES, chain, experts, op, tied, traced

import piper_jax as piper
from piper_jax import where
from piper_jax.ir.ids import NodeId
from piper_jax.ir.linear import dispatch_order, linearize
from piper_jax.ir.nodes import Collective, DeviceGroup, OrderEdge, Recv, Send, Update
from piper_jax.planning import complete


def of_class(dag, cls):
    return {str(name): node for name, node in dag.nodes.items() if isinstance(node, cls)}


def sources(dag, name):
    return {str(e.src): e.values for e in dag.data if str(e.dst) == name}


def targets(dag, name):
    return {str(e.dst): e.values for e in dag.data if str(e.src) == name}


def two_groups(plan, size=1):
    first, second = tuple(range(size)), tuple(range(size, 2 * size))
    return plan.place(where(PP=0), group=first).place(where(PP=1), group=second)


# -- transfers ----------
def test_one_pair_carries_all_that_a_group_needs_from_a_producer():
    ops = [op("a", 0), op("b", 1), op("c", 1)]
    plan = two_groups(traced(ops, [("a", "b", "x"), ("a", "c", "y"), ("a", "b", "y"), ("b", "c", "z")]))
    dag = plan.complete()
    sends = of_class(dag, Send)
    assert sends["F[PP=0] send a>d1"].values == ("x", "y")
    assert targets(dag, "F[PP=0] recv a>d1") == {"F[PP=1] b": ("x", "y"), "F[PP=1] c": ("y",)}
    assert list(sends) == ["F[PP=0] send a>d1", "B[PP=1] send c>d0", "B[PP=1] send b>d0"]


def test_a_skip_goes_straight_from_producer_to_consumer():
    ops = [op("a", 0), op("b", 1), op("c", 2)]
    plan = traced(ops, [("a", "b", "x"), ("b", "c", "y"), ("a", "c", "skip")])
    for stage in range(3):
        plan = plan.place(where(PP=stage), group=stage)
    dag = plan.complete()
    assert of_class(dag, Send)["F[PP=0] send a>d2"].values == ("skip",)
    assert of_class(dag, Send)["F[PP=0] send a>d1"].values == ("x",)


def test_every_send_and_receive_name_each_other():
    dag = two_groups(chain(2).split(where(), num_microbatches=4)).complete()
    for name, send in of_class(dag, Send).items():
        recv = dag.nodes[send.match]
        assert isinstance(recv, Recv)
        assert str(recv.match) == name
        assert (recv.group, recv.peer) == (send.peer, send.group)


def test_nothing_is_sent_inside_a_group():
    assert not of_class(chain(3).place(where(), group=0).complete(), Send)


# -- reductions and updates ----------
def test_plain_data_parallelism_reduces_once_per_step():
    plan = two_groups(chain(2).split(where(), num_microbatches=4), size=2).replicate(where())
    dag = plan.complete()
    reductions = of_class(dag, Collective)
    assert list(reductions) == ["B all_reduce gradient layers.0", "B all_reduce gradient layers.1"]
    node = reductions["B all_reduce gradient layers.0"]
    assert (node.group, node.axes, node.values) == ("d0-1", ("data",), ("gradient layers.0",))
    assert len(sources(dag, "B all_reduce gradient layers.0")) == 4
    assert targets(dag, "B all_reduce gradient layers.0") == {"U update d0-1": ("gradient layers.0",)}


def test_no_reduction_where_every_parameter_has_one_copy():
    dag = two_groups(chain(2)).replicate(where()).complete()
    assert not of_class(dag, Collective)
    assert sources(dag, "U update d0") == {"B[PP=0] layers.0": ("gradient layers.0",)}


def test_tied_state_gets_one_reduction_over_the_union_of_its_owners():
    plan = two_groups(tied(2).split(where(), num_microbatches=2), size=2).replicate(where())
    dag = plan.complete()
    node = of_class(dag, Collective)["B all_reduce gradient embedding"]
    assert (node.group, node.axes) == ("d0-1+d2-3", ("owner", "data"))
    assert dag.groups["d0-1+d2-3"] == DeviceGroup(
        name="d0-1+d2-3", devices=(0, 1, 2, 3), axes=(("owner", 2), ("data", 2))
    )
    assert len(sources(dag, "B all_reduce gradient embedding")) == 4
    assert list(targets(dag, "B all_reduce gradient embedding")) == ["U update d0-1", "U update d2-3"]
    assert of_class(dag, Update)["U update d2-3"].buckets == ("embedding", "layers.1")


def test_owners_of_different_shapes_are_joined_flat():
    plan = tied(2).place(where(PP=0), group=0).place(where(PP=1), group=(1, 2)).replicate(where())
    dag = plan.complete()
    assert dag.groups["d0+d1-2"].axes == (("owner", 3),)
    assert of_class(dag, Collective)["B all_reduce gradient embedding"].axes == ("owner",)


def test_zero_1_scatters_gradients_and_gathers_updated_parameters():
    plan = chain(1).split(where(), num_microbatches=2).place(where(), group=(0, 1))
    dag = plan.replicate(where(), axes=("data",), shard_optimizer=True).complete()
    assert list(of_class(dag, Collective)) == [
        "B reduce_scatter gradient layers.0",
        "U all_gather parameters layers.0",
    ]
    assert list(sources(dag, "U all_gather parameters layers.0")) == ["U update d0-1"]


def test_zero_2_scatters_after_every_microbatch():
    plan = chain(1).split(where(), num_microbatches=2).place(where(), group=(0, 1))
    dag = plan.replicate(where(), shard_grads=True, reduce_every="microbatch").complete()
    assert list(of_class(dag, Collective)) == [
        "B[MB=0] reduce_scatter gradient layers.0",
        "B[MB=1] reduce_scatter gradient layers.0",
        "U all_gather parameters layers.0",
    ]
    assert list(sources(dag, "B[MB=1] reduce_scatter gradient layers.0")) == ["B[PP=0,MB=1] layers.0"]
    assert list(sources(dag, "U update d0-1")) == [
        "B[MB=0] reduce_scatter gradient layers.0",
        "B[MB=1] reduce_scatter gradient layers.0",
    ]


def test_bucket_bytes_join_neighbouring_buckets():
    plan = chain(4).cut(stages=1).place(where(), group=(0, 1))
    dag = plan.replicate(where(), bucket_bytes=3 * LEAF_BYTES).complete()
    nodes = of_class(dag, Collective)
    assert list(nodes) == ["B all_reduce gradient layers.0 and 2 more", "B all_reduce gradient layers.3"]
    assert nodes["B all_reduce gradient layers.0 and 2 more"].values == tuple(f"gradient layers.{i}" for i in range(3))


def test_state_without_gradient_is_not_reduced_with_its_neighbour():
    plan = traced([op("a", 0), op("unused", 0, has_backward=False)], [("a", "unused", "x")]).place(
        where(), group=(0, 1)
    )
    dag = plan.replicate(where(), bucket_bytes=10**6).check().complete()
    assert [node.values for node in of_class(dag, Collective).values()] == [("gradient a",)]
    assert [node.buckets for node in of_class(dag, Update).values()] == [("a", "unused")]


def test_who_reads_state_without_giving_a_gradient_reads_before_the_update():
    """A tied parameter behind ``stop_gradient``: its update waits for nothing else on that group."""
    ops = [op("a", 0), op("detached", 1, reads=("tied",)), op("b", 2, reads=("tied",))]
    plan = traced(ops, [("a", "detached", "x"), ("detached", "b", "y")])
    reader, update = NodeId("detached", "B", 1), NodeId("update tied", "U")
    data = tuple(e for e in plan.dag.data if (e.src, e.dst) != (reader, update))
    plan = replace(plan, dag=replace(plan.dag, data=data, order=(OrderEdge(reader, update, "read before update"),)))
    plan = plan.split(where(), num_microbatches=2)
    for stage in range(3):
        plan = plan.place(where(PP=stage), group=stage)
    plan = plan.order([where(PP=stage, PASS=p, MB=mb) for stage in (0, 1) for p in ("F", "B") for mb in (0, 1)])
    order = [str(slot.nodes[-1]) for slot in linearize(plan.check().complete())["d1"]]
    assert order.index("U update d1") > order.index("B[PP=1,MB=1] detached")


def test_frozen_state_has_no_update_and_unused_state_lies_on_the_first_group():
    plan = two_groups(traced([op("a", 0), op("b", 1)], [("a", "b", "x")], frozen=("b",)))
    updates = of_class(plan.complete(), Update)
    assert {name: node.buckets for name, node in updates.items()} == {"U update d0": ("a",)}


def test_a_coupling_makes_two_rounds_with_one_exchange():
    plan = two_groups(traced([op("a", 0), op("b", 1)], [("a", "b", "x")], couplings=1))
    dag = plan.complete()
    assert list(of_class(dag, Update)) == [
        "U update d0",
        "U update d0 round 1",
        "U update d1",
        "U update d1 round 1",
    ]
    exchange = of_class(dag, Collective)["U all_gather update scalars 0"]
    assert (exchange.group, exchange.axes, exchange.values) == ("d0+d1", (), ("update scalars 0",))
    assert list(targets(dag, "U all_gather update scalars 0")) == ["U update d0 round 1", "U update d1 round 1"]


def test_a_coupling_inside_one_group_needs_no_exchange():
    plan = traced([op("a", 0)], [], couplings=2).place(where(), group=0)
    dag = plan.complete()
    assert not of_class(dag, Collective)
    assert list(of_class(dag, Update)) == ["U update d0"]


def test_a_coupling_of_shards_is_exchanged_inside_their_group():
    plan = traced([op("a", 0)], [], couplings=1).place(where(), group=(0, 1)).replicate(where(), shard_optimizer=True)
    dag = plan.complete()
    assert of_class(dag, Collective)["U all_gather update scalars 0"].group == "d0-1"
    assert list(sources(dag, "U all_gather parameters a")) == ["U update d0-1 round 1"]


# -- ZeRO-3 ----------
def looped(distance):
    """Two stages on one group, visited in turn."""
    plan = chain(2).split(where(), num_microbatches=1).place(where(), group=(0, 1))
    plan = plan.order([where(PP=0, PASS="F"), where(PP=1, PASS="F"), where(PP=1, PASS="B"), where(PP=0, PASS="B")])
    return plan.replicate(where(), shard_params=True, gather_distance=distance).complete()


def test_zero_3_gathers_a_slot_ahead_and_shares_among_neighbours():
    rows = [[str(node) for node in slot.nodes] for slot in linearize(looped(1))["d0-1"]]
    assert [row for row in rows if "reduce" not in row[0]][:5] == [
        ["F[PP=0,MB=0] all_gather parameters layers.0"],
        ["F[PP=1,MB=0] all_gather parameters layers.1", "F[PP=0,MB=0] layers.0"],
        ["F[PP=1,MB=0] layers.1"],
        ["B[PP=0,MB=0] all_gather parameters layers.0", "B[PP=1,MB=0] layers.1"],
        ["B[PP=0,MB=0] layers.0"],
    ]
    assert not any("all_gather" in name for row in rows[5:] for name in row)


def test_a_longer_gather_distance_keeps_parameters_instead():
    names = [str(node) for node in looped(3).nodes if "all_gather" in node.op]
    assert names == ["F[PP=0,MB=0] all_gather parameters layers.0", "F[PP=1,MB=0] all_gather parameters layers.1"]


def test_gather_distance_zero_gathers_just_before_the_use():
    rows = [str(slot.nodes[0]) for slot in linearize(looped(0))["d0-1"]]
    assert rows[:4] == [
        "F[PP=0,MB=0] all_gather parameters layers.0",
        "F[PP=0,MB=0] layers.0",
        "F[PP=1,MB=0] all_gather parameters layers.1",
        "F[PP=1,MB=0] layers.1",
    ]


# -- experts ----------
def sharded_experts():
    plan = experts(1).split(where(), num_microbatches=2)
    group = DeviceGroup(name="g0", devices=(0, 1, 2, 3), axes=(("data", 2), ("expert", 2)))
    plan = plan.place(where(), group=group).shard(where(EP=...), stream="exchange")
    return plan.replicate(where(), axes=("data", "expert"))


def test_experts_exchange_what_enters_and_leaves_them():
    dag = sharded_experts().complete()
    enter = "F[PP=0,EP=0,MB=0] all_to_all enter layers.0.experts"
    leave = "F[PP=0,EP=0,MB=0] all_to_all leave layers.0.experts"
    assert sources(dag, enter) == {"F[PP=0,MB=0] layers.0.gate": ("dispatch.0",)}
    assert targets(dag, leave) == {"F[PP=0,MB=0] layers.0.combine": ("expert.0",)}
    assert of_class(dag, Collective)[enter].axes == ("expert",)
    assert of_class(dag, Collective)[enter].stream == "exchange"
    back = "B[PP=0,EP=0,MB=0] all_to_all enter layers.0.experts"
    assert sources(dag, back) == {"B[PP=0,MB=0] layers.0.combine": ("d expert.0",)}
    assert ("skip.0",) in targets(dag, "F[PP=0,MB=0] layers.0.gate").values()


def test_expert_parameters_are_reduced_over_data_alone():
    nodes = of_class(sharded_experts().complete(), Collective)
    assert nodes["B all_reduce gradient layers.0.experts"].axes == ("data",)
    assert nodes["B all_reduce gradient layers.0.gate"].axes == ("data", "expert")


def test_exchanges_join_the_slot_and_skip_the_weight_half():
    plan = sharded_experts().order(
        [
            where(MB=0, PASS="F"),
            (where(MB=1, PASS="F"), where(MB=0, PASS="BI")),
            where(MB=1, PASS="B"),
            where(MB=0, PASS="BW"),
        ]
    )
    rows = linearize(plan.complete())["g0"]
    members = [str(node) for node in rows[1].nodes]
    assert [name.split("[")[0] for name in members] == ["BI", "F"] * (len(members) // 2)  # they take turns
    assert [" ".join(name.split()[1:3]) for name in members if "all_to_all" in name] == [
        "all_to_all enter", "all_to_all enter", "all_to_all leave", "all_to_all leave"
    ]  # fmt: skip
    assert not [node for node in plan.complete().nodes if node.PASS == "BW" and "all_to_all" in node.op]


def test_no_exchange_over_an_axis_of_size_one():
    group = DeviceGroup(name="g0", devices=(0,), axes=(("data", 1), ("expert", 1)))
    assert not of_class(experts(1).place(where(), group=group).shard(where(EP=...)).complete(), Collective)


# -- the whole ----------
def test_completion_is_idempotent_and_computed_once():
    plan = two_groups(chain(2))
    assert complete(plan.complete()) is plan.complete()


def test_size_does_not_grow_with_data_parallelism():
    def nodes(data_parallel):
        strategy = piper.Strategy(pipeline_parallel=2, data_parallel=data_parallel, num_microbatches=4)
        return set(chain(2, rows=1024).apply(strategy).complete().nodes)

    assert nodes(2) == nodes(128)


def test_an_unordered_plan_runs_as_early_as_its_edges_allow():
    plan = two_groups(chain(2).split(where(), num_microbatches=2))
    rows = linearize(plan.complete())
    assert [str(slot.nodes[0]) for slot in rows["d0"]] == [
        "F[PP=0,MB=0] layers.0",
        "F[PP=0,MB=1] layers.0",
        "F[PP=0,MB=0] send layers.0>d1",
        "F[PP=0,MB=1] send layers.0>d1",
        "B[PP=1,MB=0] recv layers.1>d0",
        "B[PP=1,MB=1] recv layers.1>d0",
        "B[PP=0,MB=0] layers.0",
        "B[PP=0,MB=1] layers.0",
        "U update d0",
    ]


def test_dispatch_order_holds_every_node_once_with_receives_after_their_sends():
    dag = chain(4).apply(piper.Strategy(pipeline_parallel=4, num_microbatches=4)).complete()
    order = [node for slot in dispatch_order(dag) for node in slot.nodes]
    assert sorted(order) == sorted(dag.nodes)
    position = {node: i for i, node in enumerate(order)}
    assert all(position[edge.src] < position[edge.dst] for edge in dag.data)
    for name, node in dag.nodes.items():
        if isinstance(node, Send):
            assert position[node.match] == position[name] + 1


def test_nodes_without_a_group_cannot_be_completed():
    with pytest.raises(piper.PlanError, match="no group yet"):
        chain(2).place(where(PP=0), group=0).complete()


def test_a_bucket_with_several_owners_is_gathered_on_all_of_them_once():
    plan = two_groups(tied(2).split(where(), num_microbatches=2), size=2)
    dag = plan.replicate(where(), shard_params=True, reduce_every="microbatch").complete()
    gather = of_class(dag, Collective)["F all_gather parameters embedding"]
    assert gather.group == "d0-1+d2-3"
    assert len(targets(dag, "F all_gather parameters embedding")) == 8
    assert "B reduce_scatter gradient embedding" in of_class(dag, Collective)
    assert NodeId("reduce_scatter gradient layers.0", "B", MB=1) in dag.nodes
