"""The event engine against published bubbles, and against plans small enough to time by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from pipeline_dags import ACTIVATION, OPTIMIZER, PARAMETER, RESIDUAL, gpipe, one_f_one_b, pipeline_dag

from piper_jax.errors import ConfigError, PlanError
from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, DataEdge, DeviceGroup, Op, OrderEdge, Recv, Send, Value
from piper_jax.simulation import CostModel, Hardware, Level, MeasuredCosts, RooflineCosts, UnitCosts, simulate
from piper_jax.simulation.costs.base import Cost
from piper_jax.simulation.sharing import shared_seconds, sharing_of

pytestmark = pytest.mark.timeout(60)

MEGABYTE = 10**6
TOY = Hardware(
    name="toy",
    flops_per_second=(("float32", 1e12),),
    memory_bandwidth=1e15,
    memory_bytes=10**9,
    levels=(Level(name="wire", num_devices=None, bandwidth=1e6, ring_bandwidth=1e6, latency_seconds=0.0),),
)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 8, 13, 32])
def test_bubble_is_the_published_one(schedule, stages, microbatches):
    report = simulate(pipeline_dag(schedule, stages, microbatches))
    assert report.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=1e-12)
    assert report.makespan == 3 * (microbatches + stages - 1)


def test_stages_with_unequal_costs_wait_for_the_slowest():
    slow = UnitCosts(F=3, B=5)
    assert simulate(pipeline_dag(one_f_one_b, 4, 6), costs=slow).makespan == 8 * (6 + 3)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (3, 4), (4, 8), (4, 2)])
def test_live_activations_of_1f1b_and_gpipe(stages, microbatches):
    for schedule, live in ((gpipe, lambda stage: microbatches), (one_f_one_b, lambda s: min(stages - s, microbatches))):
        report = simulate(pipeline_dag(schedule, stages, microbatches))
        for stage, group in enumerate(report.groups):
            assert max(s.activations + s.inside for s in group.memory.steps) == RESIDUAL * live(stage)


def test_memory_by_kind():
    memory = simulate(pipeline_dag(one_f_one_b, 3, 4)).group("g1").memory
    first, last = memory.steps[0], memory.steps[-1]
    assert (first.parameters, first.optimizer) == (PARAMETER, OPTIMIZER)
    assert first.gradients == PARAMETER, "accumulators are there from step to step"
    assert last[1:] == first[1:], "a step leaves memory as it found it"
    assert memory.peak_of_kind("transfers").transfers >= ACTIVATION
    assert memory.peak.time == 5, "the first backward of the middle stage starts at 5"


def test_what_one_program_makes_and_uses_up_is_no_array():
    last = simulate(pipeline_dag(one_f_one_b, 3, 4)).group("g2").memory
    assert {step.activations for step in last.steps} == {0}, "F and B of the last stage are one program"
    assert last.needed_bytes == last.peak_bytes + RESIDUAL


def test_equal_inputs_give_equal_reports():
    dag = pipeline_dag(one_f_one_b, 4, 8, devices_per_stage=2)
    assert simulate(dag, hardware="h100") == simulate(dag, hardware="h100")


def test_critical_path_is_contiguous_and_as_long_as_the_step():
    report = simulate(pipeline_dag(one_f_one_b, 4, 8), hardware="a100")
    path = [span for span in report.critical_path if span.kind != "recv"]
    assert path[0].start == 0
    assert path[-1].end == report.makespan
    assert all(before.end == after.start for before, after in pairwise(path))


def test_replicas_and_microbatches_divide_the_work():
    whole = simulate(pipeline_dag(gpipe, 1, 1), hardware=TOY).makespan
    assert whole == pytest.approx(3.0)
    assert simulate(pipeline_dag(gpipe, 1, 4), hardware=TOY).makespan == pytest.approx(3.0)
    assert simulate(pipeline_dag(gpipe, 1, 1, devices_per_stage=2), hardware=TOY).makespan == pytest.approx(1.5)


# -- streams and links ----------------------------------------------------------------------------
def _compute(op: str, group: str, stream: str = "compute") -> Compute:
    return Compute(id=NodeId(op, "F", PP=0), group=group, stream=stream)


def _dag(nodes, data=(), slots=(), groups=("g0", "g1"), order=()) -> Dag:
    computed = {node.id.op for node in nodes if isinstance(node, Compute)}
    return Dag(
        nodes={node.id: node for node in nodes},
        data=tuple(data),
        order=tuple(order),
        slots=tuple(Slot(group=group, nodes=tuple(ids)) for group, ids in slots),
        ops={op: Op(name=op, flops_forward=2 * 10**12) for op in computed},
        values={name: Value(name=name, nbytes=MEGABYTE) for name in ("x", "y")},
        groups={g: DeviceGroup(name=g, devices=(2 * i, 2 * i + 1), axes=(("data", 2),)) for i, g in enumerate(groups)},
    )


def _spans(report, kind):
    return [(span.nodes[0].op, span.start, span.end, span.blocked) for span in report.timeline if span.kind == kind]


def test_different_streams_overlap_and_one_stream_is_serial():
    one, other = _compute("a", "g0"), _compute("b", "g0")
    assert simulate(_dag([one, other]), hardware=TOY).makespan == pytest.approx(2.0)
    aside = replace(other, stream="aside")
    report = simulate(_dag([one, aside]), hardware=TOY)
    assert report.makespan == pytest.approx(1.0)
    assert report.group("g0").busy == pytest.approx({"compute": 1.0, "aside": 1.0})
    assert report.group("g0").bubble == pytest.approx(0.0)


def _pair(word: str, src: str, dst: str, value: str, stream: str = "recv") -> tuple[Send, Recv]:
    send, recv = NodeId(f"send {word}", "F"), NodeId(f"recv {word}", "F")
    return (
        Send(id=send, group=src, peer=dst, values=(value,), match=recv),
        Recv(id=recv, group=dst, peer=src, values=(value,), match=send, stream=stream),
    )


def test_transfers_share_a_link_in_turn():
    x, y = _pair("x", "g0", "g1", "x"), _pair("y", "g0", "g2", "y")
    start = [_compute(name, name) for name in ("g0", "g1", "g2")]
    edges = [DataEdge(pair[0].id, pair[1].id, pair[0].values) for pair in (x, y)]
    report = simulate(_dag([*start, *x, *y], edges, groups=("g0", "g1", "g2")), hardware=TOY)
    assert _spans(report, "send") == [("send x", 0.0, 1.0, 0.0), ("send y", 1.0, 2.0, 1.0)]


def test_an_early_receive_blocks_its_stream():
    send, recv = _pair("x", "g0", "g1", "x", stream="compute")
    first, work = _compute("first", "g0"), _compute("work", "g1")
    data = [DataEdge(first.id, send.id, ("x",)), DataEdge(send.id, recv.id, ("x",))]
    early = _dag([first, send, recv, work], data, slots=[("g1", [recv.id]), ("g1", [work.id])])
    late = _dag([first, send, recv, work], data, slots=[("g1", [work.id]), ("g1", [recv.id])])
    assert simulate(late, hardware=TOY).makespan == pytest.approx(2.0)
    report = simulate(early, hardware=TOY)
    assert report.makespan == pytest.approx(3.0)
    assert _spans(report, "recv") == [("recv x", 1.0, 2.0, 1.0)]


def test_a_slot_hides_communication_under_compute():
    a2a = Collective(id=NodeId("all_to_all x", "F"), group="g0", kind="all_to_all", axes=("data",), values=("x",))
    before, after, other = _compute("before", "g0"), _compute("after", "g0"), _compute("other", "g0")
    data = [DataEdge(before.id, a2a.id, ("x",)), DataEdge(a2a.id, after.id, ("x",))]
    members = [before.id, a2a.id, after.id, other.id]
    apart = simulate(_dag([before, a2a, after, other], data), hardware=TOY)
    together = simulate(_dag([before, a2a, after, other], data, slots=[("g0", members)]), hardware=TOY)
    assert apart.makespan == pytest.approx(3.5)
    assert together.makespan == pytest.approx(3.0)
    assert _spans(together, "all_to_all") == [("all_to_all x", 1.0, 1.5, 0.0)]


def test_collectives_on_a_joint_group_wait_for_all_members():
    early, late, later = _compute("early", "g0"), _compute("late", "g1"), _compute("later", "g1")
    reduce = Collective(id=NodeId("all_reduce w", "B"), group="g0+g1", kind="all_reduce", values=("x",))
    dag = _dag([early, late, later, reduce], [DataEdge(n.id, reduce.id, ("x",)) for n in (early, late, later)])
    joint = DeviceGroup(name="g0+g1", devices=(0, 1, 2, 3), axes=(("owner", 2), ("data", 2)))
    report = simulate(replace(dag, groups={**dag.groups, "g0+g1": joint}), hardware=TOY)
    assert [(span.group, span.start, span.end) for span in report.timeline if span.kind == "all_reduce"] == [
        ("g0", 2.0, 3.5),
        ("g1", 2.0, 3.5),
    ]


def test_devices_that_share_cores_slow_each_other():
    nodes = [_compute("a", "g0"), _compute("b", "g1")]
    assert simulate(_dag(nodes), hardware=replace(TOY, concurrency=1.0)).makespan == pytest.approx(2.0)
    assert simulate(_dag(nodes), hardware=replace(TOY, concurrency=2.0)).makespan == pytest.approx(1.0)


@pytest.mark.parametrize("concurrency", [0.5, 1.0, 1.3, 2.0, 2.9])
def test_sharing_is_found_from_how_long_tasks_take_together(concurrency):
    """What the engine makes of tasks that share ``concurrency`` processors leads back to it."""
    alone = {"g0": 3.0, "g1": 1.0, "g2": 2.5}
    dag = _dag([_compute(group, group) for group in alone], groups=tuple(alone))
    table = {(op, "F"): seconds for op, seconds in alone.items()}
    together = simulate(dag, costs=MeasuredCosts(seconds=table, num_processors=concurrency)).makespan
    assert together == pytest.approx(shared_seconds(list(alone.values()), concurrency))
    if together > 3.0 * 1.02:
        assert sharing_of(list(alone.values()), together) == pytest.approx(concurrency, rel=1e-3)
    assert sharing_of(list(alone.values()), 3.0) is None
    assert sharing_of([], 0.0) is None


def test_a_cyclic_order_is_named():
    a, b = _compute("a", "g0"), _compute("b", "g0")
    with pytest.raises(PlanError) as caught:
        simulate(_dag([a, b], order=[OrderEdge(a.id, b.id), OrderEdge(b.id, a.id)]))
    assert len(str(caught.value).splitlines()) <= 12
    assert "F[PP=0] a" in str(caught.value)


# -- costs ------------------------------------------------------------------------------------------
def test_measured_costs_by_pass_and_from_a_timeline():
    dag = pipeline_dag(one_f_one_b, 3, 4)
    table = {(op, PASS): seconds for op in dag.ops for PASS, seconds in (("F", 0.25), ("B", 0.5))}
    report = simulate(dag, costs=table)
    assert (report.costs, report.time_unit) == ("measured", "s")
    assert report.makespan == pytest.approx(0.75 * 6)
    again = simulate(dag, costs=MeasuredCosts.from_timeline(report.timeline))
    assert again.makespan == pytest.approx(report.makespan)


def test_a_missing_measurement_is_named():
    with pytest.raises(ConfigError, match=r"no measured cost for F\[PP=0,MB=0\] layers.0"):
        simulate(pipeline_dag(gpipe, 2, 2), costs={("layers.1", "F"): 1.0})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hardware": "h10"}, "did you mean 'h100'?"),
        ({"costs": "units"}, "did you mean 'unit'?"),
        ({"costs": "roofline"}, "hardware='h100'"),
        ({"costs": "measured"}, "train.measure_costs(state, batch)"),
    ],
)
def test_unknown_names_are_errors_with_a_suggestion(options, text):
    with pytest.raises(ConfigError) as caught:
        simulate(pipeline_dag(gpipe, 2, 2), **options)
    assert text in str(caught.value)


@pytest.mark.parametrize("name", ["a100", "p4d", "h100", "h200", "v5e", "v5p", "v6e", "cpu", "H100"])
def test_every_profile_gives_a_finite_step(name):
    report = simulate(pipeline_dag(one_f_one_b, 4, 8, devices_per_stage=4), hardware=name)
    assert 0 < report.makespan < 3600
    assert 0 < report.bubble < 1
    assert report.costs == f"roofline {name.lower()}"


# -- size -------------------------------------------------------------------------------------------
def test_fifty_thousand_nodes_in_seconds():
    dag = pipeline_dag(one_f_one_b, 64, 128)
    assert len(dag.nodes) > 48_000
    start = time.process_time()
    report = simulate(dag)
    assert time.process_time() - start < 10
    assert report.bubble == pytest.approx(63 / (128 + 63))


# -- costs and hardware that cannot be ------------------------------------------------------------------------------
WIRE = TOY.levels[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UnitCosts(F=-1), "UnitCosts: F=-1.\nhelp: give a finite number from 0."),
        (lambda: UnitCosts(BW=float("nan")), "UnitCosts: BW=nan.\nhelp: give a finite number from 0."),
        (
            lambda: replace(TOY, launch_seconds=-1e-6),
            "Hardware 'toy': launch_seconds=-1e-06.\nhelp: give a finite number from 0.",
        ),
        (
            lambda: replace(TOY, memory_bandwidth=0),
            "Hardware 'toy': memory_bandwidth=0.\nhelp: give a finite number above 0.",
        ),
        (lambda: replace(TOY, concurrency=0), "Hardware 'toy': concurrency=0.\nhelp: give a finite number above 0."),
        (
            lambda: replace(TOY, flops_per_second=(("float32", 0.0),)),
            "Hardware 'toy': flops_per_second of float32=0.0.\nhelp: give a finite number above 0.",
        ),
        (
            lambda: replace(TOY, flops_per_second=()),
            "Hardware 'toy': flops_per_second has no float32.\nhelp: list it; the rate of dtypes that are not listed.",
        ),
        (
            lambda: replace(TOY, levels=()),
            "Hardware 'toy': levels is empty.\nhelp: give one Level at least, with num_devices=None.",
        ),
        (lambda: replace(WIRE, bandwidth=0), "Level 'wire': bandwidth=0.\nhelp: give a finite number above 0."),
        (
            lambda: replace(WIRE, ring_bandwidth=-1.0),
            "Level 'wire': ring_bandwidth=-1.0.\nhelp: give a finite number above 0.",
        ),
        (
            lambda: replace(WIRE, latency_seconds=-1.0),
            "Level 'wire': latency_seconds=-1.0.\nhelp: give a finite number from 0.",
        ),
        (lambda: replace(WIRE, num_devices=0), "Level 'wire': num_devices=0.\nhelp: give a finite number above 0."),
        (
            lambda: RooflineCosts(hardware=TOY, efficiency=0),
            "RooflineCosts: efficiency=0.\nhelp: give a finite number above 0.",
        ),
        (
            lambda: replace(WIRE, bandwidth=float("inf")),
            "Level 'wire': bandwidth=inf.\nhelp: give a finite number above 0.",
        ),
        (
            lambda: MeasuredCosts(seconds={("a", "F"): float("inf")}),
            "MeasuredCosts: seconds of ('a', 'F')=inf.\nhelp: give a finite number from 0.",
        ),
    ],
)
def test_costs_and_hardware_that_cannot_be_are_refused(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == message


class Answering(CostModel):
    """Gives the same for every node."""

    def __init__(self, answer):
        self.answer = answer

    def describe(self, passes):
        return "mine"

    def bind(self, dag):
        return lambda node: self.answer() if callable(self.answer) else self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Cost(float("nan")), "Answering: the cost is nan for F[PP=0,MB=0] layers.0."),
        (Cost(float("inf")), "Answering: the cost is inf for F[PP=0,MB=0] layers.0."),
        (Cost(-1.0), "Answering: the cost is -1.0 for F[PP=0,MB=0] layers.0."),
        (Cost("1"), "Answering: the cost is '1' for F[PP=0,MB=0] layers.0."),
        (1.0, "Answering: 1.0 is not a Cost for F[PP=0,MB=0] layers.0."),
        (Cost(1.0, ("wire",)), "Answering: links=('wire',) are no tuple of Link for F[PP=0,MB=0] layers.0."),
        (lambda: 1 / 0, "Answering fails for F[PP=0,MB=0] layers.0: ZeroDivisionError: division by zero"),
    ],
)
def test_what_a_cost_model_answers_is_checked_and_names_the_node(answer, message):
    with pytest.raises(ConfigError) as caught:
        simulate(pipeline_dag(gpipe, 2, 2), costs=Answering(answer))
    assert str(caught.value).splitlines()[0] == message


@pytest.mark.parametrize("sizes", [(8, 4), (None, 8), (2, 3, None), (4, 4, None)])
def test_levels_of_a_network_hold_one_another(sizes):
    levels = tuple(
        Level(name=f"l{n}", num_devices=size, bandwidth=1e9, ring_bandwidth=1e9, latency_seconds=0.0)
        for n, size in enumerate(sizes)
    )
    with pytest.raises(ConfigError, match="its levels are of"):
        Hardware(
            name="mine", flops_per_second=(("float32", 1e12),), memory_bandwidth=1e12, memory_bytes=1, levels=levels
        )
