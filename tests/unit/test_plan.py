"""Plans as values: history, replay, JSON, text, binding."""

from __future__ import annotations

import json

import pytest
from traced_dags import chain, experts, tied

import piper_jax as piper
from piper_jax import PlanError, where
from piper_jax.ir.decoding import dag_from_data
from piper_jax.ir.encoding import dag_data
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import DeviceGroup
from piper_jax.planning import Plan, plan_from_json, plan_json


def rich_plan() -> Plan:
    """A plan that uses every directive and every kind of filter."""
    group = DeviceGroup(name="g0", devices=(0, 1, 2, 3), axes=(("data", 2), ("expert", 2)))
    plan = experts(4).cut(stages=[(0, 1), (2, 3)]).split(where(), num_microbatches=4)
    plan = plan.place(where(PP=0), group=group).place(where(PP=1), group=(4, 5), stream="second")
    plan = plan.shard(where(PP=0, EP=...)).remat(where("layers.3", PP=(1,)), policy="dots_saveable")
    plan = plan.replicate(where(PP=0), axes=("data", "expert"), shard_params=True, gather_distance=2)
    plan = plan.replicate(where(PP=1), axes=("data",), bucket_bytes=1 << 20)
    forwards = where(PASS="F") & ~where(MB=range(2, 4))
    plan = plan.order([forwards, where(MB=(2, 3), PASS="F"), where(MB=0, PASS="BI") | where(MB=1, PASS="BI")])
    return plan.order([(where(MB=0, PASS="BW"), where(MB=2, PASS="B")), where(MB=3, PASS="B"), where(MB=1, PASS="BW")])


def test_a_plan_is_not_saved_where_nothing_can_be_written(tmp_path):
    plan = chain(2)
    with pytest.raises(piper.ConfigError) as caught:
        plan.save(tmp_path / "none" / "plan.json")
    assert str(caught.value) == (
        f"cannot write {tmp_path}/none/plan.json: No such file or directory.\n"
        f"help: make the folder {tmp_path}/none first."
    )


def test_the_rich_plan_is_sound():
    rich_plan().check()


def test_json_gives_the_same_plan_back():
    plan = rich_plan()
    text = plan_json(plan)
    again = plan_from_json(text)
    assert again == plan
    assert plan_json(again) == text
    assert again.fingerprint == "hand-built"
    assert list(again.dag.nodes) == list(plan.dag.nodes)
    again.check()


def test_a_completed_dag_survives_json_too():
    dag = rich_plan().complete()
    assert dag_from_data(json.loads(json.dumps(dag_data(dag)))) == dag


def test_history_replays_to_the_same_plan():
    plan = rich_plan()
    loaded = plan_from_json(plan_json(plan))
    assert experts(4).replay(loaded.history) == plan


def test_save_and_load(tmp_path):
    plan = chain(4).apply(piper.Strategy(pipeline_parallel=2, data_parallel=2))
    plan.save(tmp_path / "plan.json")
    assert piper.load_plan(tmp_path / "plan.json") == plan


def test_history_prints_as_calls_with_the_line_of_the_caller():
    plan = chain(2).place(where(PP=0), group=(0, 1))
    assert str(plan.history[0]) == "place(where(PP=0), group=(0, 1), stream='compute')"
    assert plan.history[0].line.startswith("test_plan.py:")
    applied = chain(2).apply(piper.Strategy(pipeline_parallel=2))
    assert {record.line.split(":")[0] for record in applied.history} == {"test_plan.py"}


def test_forward_maps_follow_a_node_through_all_directives():
    plan = chain(4).cut(stages=2).split(where(), num_microbatches=2).place(where(), group=0)
    plan = plan.order([where(MB=0, PASS="BI")])
    assert plan.forward(NodeId("layers.3", "B", 3)) == (
        NodeId("layers.2-3", "BI", 1, None, 0),
        NodeId("layers.2-3", "BW", 1, None, 0),
        NodeId("layers.2-3", "B", 1, None, 1),
    )
    assert all(node in plan.dag.nodes for old in chain(4).dag.nodes for node in plan.forward(old))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a piper plan"),
        ('{"format": "piper-plan", "version": 99}', "format version 99"),
        ('{"format": "piper-plan", "version": 1, "fingerprint": "", "history": []}', "is damaged"),
        (
            '{"format": "piper-plan", "version": 1, "fingerprint": "", "history": [], "dag": {"nodes": [1]}}',
            "is damaged",
        ),
    ],
)
def test_what_is_not_a_plan_is_refused(text, message):
    with pytest.raises(PlanError, match=message):
        plan_from_json(text)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(PlanError, match="cannot read"):
        piper.load_plan(tmp_path / "none.json")


def test_facts_of_a_plan():
    plan = tied(4).apply(piper.Strategy(pipeline_parallel=4, data_parallel=2, num_microbatches=8))
    assert (plan.num_stages, plan.num_microbatches, list(plan.groups)) == (4, 8, ["g0", "g1", "g2", "g3"])
    assert not chain(1).is_split
    assert plan.is_split


def test_a_plan_prints_what_it_is():
    plan = chain(2).apply(piper.Strategy(pipeline_parallel=2, data_parallel=2, num_microbatches=4))
    lines = str(plan).splitlines()
    assert lines[0] == "plan  stages=2 microbatches=4 groups=2 devices=4 nodes=18"
    assert lines[-7:] == [
        "  g0: devices 0-1, data=2 expert=1 tensor=1",
        "  g1: devices 2-3, data=2 expert=1 tensor=1",
        "order",
        "  g0 | F0 F1 B0 F2 B1 F3 B2 B3 U",
        "  g1 | F0 B0 F1 B1 F2 B2 F3 B3 U",
        "collectives",
        "  2 all_reduce",
    ]


def test_a_dag_prints_what_each_group_runs():
    plan = chain(2)
    assert str(plan.dag).splitlines()[:2] == ["nodes", "  F[PP=0] layers.0"]
    dag = plan.apply(piper.Strategy(pipeline_parallel=2, num_microbatches=16)).complete()
    lines = str(dag).splitlines()
    assert lines[:2] == ["groups", "  g0: devices 0, data=1 expert=1 tensor=1"]
    assert lines[lines.index("g0") + 1 : lines.index("g1")][::24] == ["  F[PP=0,MB=0] layers.0", "  ... 41 more"]
    assert repr(dag) == f"Dag({len(dag.nodes)} nodes, {len(dag.data)} edges, 2 groups)"


def test_a_large_plan_still_prints_on_a_screen():
    plan = chain(64).apply(piper.Strategy(pipeline_parallel=64, num_microbatches=64))
    assert len(str(plan).splitlines()) < 100
    assert max(len(line) for line in str(plan).splitlines()) < 300


def test_a_plan_shows_in_notebooks():
    plan = chain(2)
    assert plan._repr_html_().startswith("<pre>plan  stages=2")
    html = plan.apply(piper.Strategy(pipeline_parallel=2, num_microbatches=4))._repr_html_()
    assert html.count("<tr>") == 2
    assert html.count(">F0<") == 2
    assert html.count(">B3<") == 2
