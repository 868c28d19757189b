"""The primitive directives: what each does to a DAG."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from traced_dags import chain, experts, op, stacked, tied, traced

import piper_jax as piper
from piper_jax import DirectiveError, simulate, where
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import DeviceGroup, Replication
from piper_jax.ir.rules import check
from piper_jax.primitives.balance import balanced_stages, stages_at_borders


def edges(dag):
    return {(str(e.src), str(e.dst)): e.values for e in dag.data}


# -- cut ----------
def test_cut_is_the_identity_where_units_are_stages():
    plan = chain(4)
    assert plan.cut(stages=4).dag == plan.dag


def test_cut_merges_neighbours_and_their_costs():
    plan = chain(4).cut(stages=2)
    assert list(plan.dag.ops) == ["layers.0-1", "layers.2-3"]
    merged = plan.dag.ops["layers.0-1"]
    assert (merged.units, merged.PP, merged.reads) == ((0, 1), 0, ("layers.0", "layers.1"))
    assert (merged.flops_forward, merged.residual_bytes) == (200, 16384)
    assert plan.dag.values["residuals layers.0-1"].nbytes == 16384
    assert edges(plan.dag) == {
        ("F[PP=0] layers.0-1", "F[PP=1] layers.2-3"): ("add.1",),
        ("F[PP=0] layers.0-1", "B[PP=0] layers.0-1"): ("residuals layers.0-1",),
        ("F[PP=1] layers.2-3", "B[PP=1] layers.2-3"): ("residuals layers.2-3",),
        ("B[PP=1] layers.2-3", "B[PP=0] layers.0-1"): ("d add.1",),
        ("B[PP=0] layers.0-1", "U update layers.0"): ("gradient layers.0",),
        ("B[PP=0] layers.0-1", "U update layers.1"): ("gradient layers.1",),
        ("B[PP=1] layers.2-3", "U update layers.2"): ("gradient layers.2",),
        ("B[PP=1] layers.2-3", "U update layers.3"): ("gradient layers.3",),
    }
    assert plan.forward(NodeId("layers.3", "F", 3)) == (NodeId("layers.2-3", "F", 1),)


def test_cut_counts_the_cost_of_every_unit():
    ops = [op(f"layers.{i}", i) for i in range(7)] + [op("head", 7, flops_forward=400, flops_backward_input=400)]
    flows = [(a.name, b.name, f"v.{a.name}") for a, b in pairwise(ops)]
    assert list(traced(ops, flows).cut(stages=3).dag.ops) == ["layers.0-3", "layers.4-6", "head"]


def test_cut_takes_explicit_stages():
    plan = chain(4).cut(stages=[(0,), (1, 2, 3)])
    assert list(plan.dag.ops) == ["layers.0", "layers.1-3"]


def test_stages_are_given_by_module_paths() -> None:
    plan = chain(4).cut(stages=["layers.0", "layers.1-3"])
    assert plan.dag == chain(4).cut(stages=[(0,), (1, 2, 3)]).dag
    assert chain(4).replay(plan.history).dag == plan.dag
    strategy = piper.Strategy(pipeline_parallel=2, stages=("layers.0-2", "layers.3"))
    assert [op.units for op in chain(4).apply(strategy).dag.ops.values()] == [(0, 1, 2), (3,)]


def _with_nameless() -> piper.Plan:
    """What lies between layers reads nothing of its own; the last unit reads the first one's parameters."""
    names = ["embed", "layers.0", "layers.0#2", "layers.1", "layers.1#2", "embed#2"]
    reads = [("embed",), ("layers.0",), (), ("layers.1",), (), ("embed",)]
    ops = [op(name, k, reads=own) for k, (name, own) in enumerate(zip(names, reads, strict=True))]
    return traced(ops, [(a, b, f"v.{a}") for a, b in pairwise(names)])


@pytest.mark.parametrize(
    ("stages", "units", "names"),
    [
        (["embed, layers.0", "layers.1"], [(0, 1, 2), (3, 4, 5)], ["embed-layers.0", "layers.1-embed#2"]),
        (["embed, layers.0", "layers.1, embed"], [(0, 1, 2), (3, 4, 5)], None),
        (["params.embed", "layers.0-1"], [(0,), (1, 2, 3, 4, 5)], ["embed", "layers.0-embed#2"]),
        (["embed", "layers.0, layers.1", "embed#2"], [(0,), (1, 2, 3, 4), (5,)], ["embed", "layers.0-1", "embed#2"]),
        (["embed", "layers.0", "layers.0#2, layers.1"], [(0,), (1,), (2, 3, 4, 5)], None),
    ],
)
def test_units_without_parameters_go_with_the_unit_before(stages: Any, units: Any, names: Any) -> None:
    ops = _with_nameless().cut(stages=stages).dag.ops
    assert [o.units for o in ops.values()] == units
    assert names is None or list(ops) == names


def test_parts_of_one_layer_keep_its_name() -> None:
    plan = _with_nameless()
    assert list(plan.cut(stages=[(0,), (1, 2), (3, 4, 5)]).dag.ops)[:2] == ["embed", "layers.0"]
    assert list(plan.cut(stages=[(0, 1), (2, 3, 4), (5,)]).dag.ops)[1] == "layers.0#2-1"
    ops = [op(name, k) for k, name in enumerate(("layers.0", "head", "head#2"))]
    assert list(traced(ops, [("layers.0", "head", "x"), ("head", "head#2", "y")]).cut(stages=1).dag.ops) == [
        "layers.0-head"
    ]


def test_the_stages_are_a_table() -> None:
    lines = str(chain(4).cut(stages=[(0,), (1, 2, 3)])).splitlines()
    heading = lines.index("stages")
    assert lines[heading + 1].split() == ["stage", "modules", "operations", "parameters", "out"]
    assert [line.split()[:3] for line in lines[heading + 2 : heading + 4]] == [
        ["PP=0", "layers.0", "25.0%"],
        ["PP=1", "layers.1-3", "75.0%"],
    ]


@pytest.mark.parametrize(
    ("costs", "stages", "ends"),
    [
        ([20, 2, 20, 2, 24, 2, 20, 2, 20, 2, 20, 2], 2, [6, 12]),  # 70, where 68 could be
        ([20, 2, 20, 2, 26, 6, 20, 2, 20, 2, 20, 2], 2, [5, 12]),  # 72 instead of 76
        ([10, 11, 10, 11], 4, [1, 2, 3, 4]),
    ],
)
def test_a_stage_ends_in_a_layer_only_where_it_saves_more_than_5_percent(
    costs: list[int], stages: int, ends: list[int]
) -> None:
    """Every second boundary is in the midst of a layer, where four times the bytes cross."""
    parts = stages_at_borders(costs, [4, 1] * (len(costs) // 2), stages)
    assert [part.stop for part in parts] == ends


def test_cut_of_seven_equal_layers_on_three_stages_is_as_equal_as_can_be():
    parts = balanced_stages([10] * 7, [1] * 7, 3)
    assert sorted(len(part) for part in parts) == [2, 2, 3]
    assert stages_at_borders([10] * 8, [1] * 8, 4) == balanced_stages([10] * 8, [1] * 8, 4)
    assert balanced_stages([10] * 8, [1] * 8, 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]


def test_cut_prefers_the_boundary_that_fewest_bytes_cross():
    assert balanced_stages([10, 1, 1, 10], [5, 1, 5, 0], 2) == [range(2), range(2, 4)]
    assert balanced_stages([10, 2, 10], [1, 9, 0], 2) == [range(1), range(1, 3)]


def test_cut_keeps_expert_regions_apart_and_stays_acyclic():
    plan = experts(2).cut(stages=1)
    assert list(plan.dag.ops) == [
        "layers.0.gate",
        "layers.0.experts",
        "layers.0.combine-layers.1.gate",
        "layers.1.experts",
        "layers.1.combine",
    ]
    assert [o.EP for o in plan.dag.ops.values()] == [None, 0, None, 0, None]
    check(plan.place(where(), group=0).complete())


def test_tied_state_stays_one_bucket():
    plan = tied(4).cut(stages=2)
    assert plan.dag.ops["layers.0-1"].reads == ("embedding", "layers.0", "layers.1")
    assert plan.dag.ops["layers.2-3"].reads == ("layers.2", "embedding", "layers.3")


# -- split and place ----------
def test_split_copies_computation_and_gathers_gradients_in_one_update():
    plan = chain(2).split(where(), num_microbatches=2)
    assert plan.num_microbatches == 2
    found = edges(plan.dag)
    assert found["F[PP=0,MB=1] layers.0", "F[PP=1,MB=1] layers.1"] == ("add.0",)
    assert ("F[PP=0,MB=0] layers.0", "F[PP=1,MB=1] layers.1") not in found
    assert found["B[PP=1,MB=0] layers.1", "U update layers.1"] == ("gradient layers.1",)
    assert found["B[PP=1,MB=1] layers.1", "U update layers.1"] == ("gradient layers.1",)
    assert plan.forward(NodeId("layers.0", "F", 0)) == (
        NodeId("layers.0", "F", 0, None, 0),
        NodeId("layers.0", "F", 0, None, 1),
    )


def test_split_into_one_still_names_the_microbatch():
    plan = chain(1).split(where(), num_microbatches=1)
    assert [str(node) for node in plan.dag.nodes] == [
        "F[PP=0,MB=0] layers.0",
        "B[PP=0,MB=0] layers.0",
        "U update layers.0",
    ]


def test_place_names_groups_by_their_devices():
    plan = chain(3).place(where(PP=0), group=(0, 1)).place(where(PP=1), group=2).place(where(PP=2), group=(5, 3))
    assert plan.groups == {
        "d0-1": DeviceGroup(name="d0-1", devices=(0, 1), axes=(("data", 2),)),
        "d2": DeviceGroup(name="d2", devices=(2,), axes=(("data", 1),)),
        "d5,3": DeviceGroup(name="d5,3", devices=(5, 3), axes=(("data", 2),)),
    }


def test_place_by_microbatch_puts_a_stage_on_two_groups():
    plan = chain(1).split(where(), num_microbatches=2)
    plan = plan.place(where(MB=0), group=0).place(where(MB=1), group="d0")
    assert {node.group for node in plan.dag.nodes.values()} == {"d0", None}
    twice = chain(1).split(where(), num_microbatches=2).place(where(MB=0), group=0).place(where(MB=1), group=1)
    assert [node for node in twice.complete().nodes if "all_reduce" in node.op] == [
        NodeId("all_reduce gradient layers.0", "B")
    ]


# -- attributes ----------
def test_replicate_sets_each_zero_stage_with_those_below():
    plan = chain(1).replicate(where(), axes=("data",), shard_params=True)
    assert plan.dag.buckets["layers.0"].replication == Replication(
        axes=("data",), shard_optimizer=True, shard_grads=True, shard_params=True
    )


def test_attributes_commute_with_order():
    base = chain(2).split(where(), num_microbatches=2).place(where(), group=(0, 1))
    order = [where(MB=0), where(MB=1)]
    before = base.replicate(where()).remat(where(PP=0), policy="dots_saveable").order(order)
    after = base.order(order).remat(where(PP=0), policy="dots_saveable").replicate(where())
    assert before.dag == after.dag


def test_shard_marks_operations():
    plan = experts(1).shard(where(EP=...), axis="expert", stream="exchange")
    assert plan.dag.ops["layers.0.experts"].shard_axis == "expert"
    assert plan.dag.ops["layers.0.experts"].shard_stream == "exchange"
    assert plan.dag.ops["layers.0.gate"].shard_axis is None


@pytest.mark.parametrize(
    ("dims", "found"),
    [
        ({"layers.kernel": 2}, (1, 1)),
        ({"*.kernel": 1}, (0, 0)),
        ({"*.kernel": -1}, (1, 1)),
        ({"layers.1.kernel": 0}, (None, 0)),
        ({"*.kernel": 1, "layers.0.kernel": -1}, (1, 0)),
    ],
    ids=str,
)
def test_dimensions_for_the_tensor_axis_are_of_the_parameter_that_has_the_path(dims, found):
    plan = stacked(2).shard(where(), axis="tensor", dims=dims)
    assert tuple(plan.dag.buckets[f"layers.{k}"].leaves[0].tensor_dim for k in (0, 1)) == found


# -- order ----------
def test_a_filter_makes_one_slot_on_each_group_that_it_concerns():
    plan = chain(2).split(where(), num_microbatches=2).place(where(PP=0), group=0).place(where(PP=1), group=1)
    plan = plan.order([where(MB=0, PASS="F"), where(MB=1, PASS="F")])
    assert [(slot.group, *map(str, slot.nodes)) for slot in plan.dag.slots] == [
        ("d0", "F[PP=0,MB=0] layers.0"),
        ("d1", "F[PP=1,MB=0] layers.1"),
        ("d0", "F[PP=0,MB=1] layers.0"),
        ("d1", "F[PP=1,MB=1] layers.1"),
    ]


def test_naming_halves_splits_just_those_backwards():
    plan = chain(2).split(where(), num_microbatches=1).place(where(), group=0)
    plan = plan.order([where(PASS="F"), where(PP=1, PASS="BI"), where(PP=0, PASS="B"), where(PP=1, PASS="BW")])
    found = edges(plan.dag)
    assert found["F[PP=1,MB=0] layers.1", "BI[PP=1,MB=0] layers.1"] == ("residuals layers.1",)
    assert found["BI[PP=1,MB=0] layers.1", "BW[PP=1,MB=0] layers.1"] == ("weight residuals layers.1",)
    assert found["BI[PP=1,MB=0] layers.1", "B[PP=0,MB=0] layers.0"] == ("d add.0",)
    assert found["BW[PP=1,MB=0] layers.1", "U update layers.1"] == ("gradient layers.1",)
    assert ("F[PP=1,MB=0] layers.1", "BW[PP=1,MB=0] layers.1") not in found
    assert plan.forward(NodeId("layers.1", "B", 1)) == (
        NodeId("layers.1", "BI", 1, None, 0),
        NodeId("layers.1", "BW", 1, None, 0),
    )


def whole_middle():
    """Three placed layers and two microbatches; the backward of the second layer is in one piece."""
    ops = [op(f"layers.{i}", i, splittable=i != 1, source=f"m.py:{i}", whole_because="a kernel") for i in range(3)]
    plan = traced(ops, [("layers.0", "layers.1", "x"), ("layers.1", "layers.2", "y")])
    return plan.split(where(), num_microbatches=2).place(where(), group=0)


HALVES = [where(PASS="F"), *(where(PASS=p, PP=s) for s in (2, 1, 0) for p in ("BI", "BW"))]


def test_a_backward_that_cannot_be_split_stays_whole_alone_and_visibly():
    plan = whole_middle().order(HALVES).check()
    passes = {(node.PP, node.PASS) for node in plan.dag.nodes if node.PASS in ("B", "BI", "BW")}
    assert passes == {(0, "BI"), (0, "BW"), (1, "B"), (2, "BI"), (2, "BW")}
    assert [[(n.PASS, n.PP, n.MB) for n in slot.nodes] for slot in plan.dag.slots][2:4] == [
        [("BW", 2, 0), ("BW", 2, 1)],
        [("B", 1, 0), ("B", 1, 1)],
    ]
    assert len(plan.dag.slots) == 6
    for text in (str(plan), str(simulate(plan))):
        assert "whole backwards, in place of BI and BW\n  layers.1 at m.py:1: a kernel" in text
        assert "layers.0 at" not in text


def test_an_order_of_whole_backwards_says_nothing_about_them():
    plan = whole_middle().order([where(PASS="F"), where(PASS="B")])
    assert "whole backwards" not in str(plan) + str(simulate(plan))


def test_filters_of_halves_combine_where_a_backward_stays_whole():
    """It counts as its own BI in a filter, a combination of filters, and an overlap slot."""
    listed = [
        where(PASS="F"),
        where(PASS="BI", PP=2) | where(PASS="BW", PP=2),
        (where(PASS="BI", PP=1, MB=0), where(PASS="BW", PP=1, MB=0)),
        where(PASS="B") & where("layers.1", MB=1),
        where(PP=0) & ~where(PASS="F"),
    ]
    plan = whole_middle().order(listed).check()
    assert [{(str(n.PASS), n.PP) for n in slot.nodes} for slot in plan.dag.slots] == [
        {("F", 0), ("F", 1), ("F", 2)}, {("BI", 2), ("BW", 2)}, {("B", 1)}, {("B", 1)}, {("B", 0)},
    ]  # fmt: skip
    plan = whole_middle().order([where(PASS="F"), where(PASS="BI")]).order([where(PASS="BW")]).check()
    assert len([n for n in plan.dag.slots[2].nodes if n.PP == 1]) == 0


def test_a_second_order_continues_after_the_first():
    plan = chain(1).split(where(), num_microbatches=2).place(where(), group=0)
    one = plan.order([where(MB=1), where(MB=0)])
    two = plan.order([where(MB=1)]).order([where(MB=0)])
    assert one.dag == two.dag


def test_each_directive_leaves_the_old_plan_as_it_was():
    plan = chain(2)
    before = plan.dag
    plan.cut(stages=1).split(where(), num_microbatches=2).place(where(), group=0).order([where(MB=0)]).replicate(
        where()
    )
    assert plan.dag == before
    assert plan.history == ()


@pytest.mark.parametrize("name", ["cut", "split", "place", "shard", "replicate", "remat", "order"])
def test_every_primitive_shows_its_rewrite(name):
    from piper_jax.primitives import PRIMITIVES

    assert "-->" in (PRIMITIVES[name].__doc__ or "")


def test_an_empty_slot_is_refused():
    with pytest.raises(DirectiveError, match="slot 1 is empty"):
        chain(2).place(where(), group=0).order([where(PASS="F"), ()])


def test_policies_that_take_arguments_are_refused_as_such():
    with pytest.raises(DirectiveError, match="take arguments"):
        chain(2).remat(where(), policy="save_only_these_names")
