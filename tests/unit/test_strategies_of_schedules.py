"""Every schedule: the published bubble, the bound on live activations, and which counts are legal."""

from __future__ import annotations

import pytest
from traced_dags import chain, tied

from piper_jax import DirectiveError, Strategy, directive, simulate
from piper_jax.ir.linear import linearize
from piper_jax.ir.nodes import Compute
from piper_jax.planning import Plan

BIG = [(1, 1), (1, 4), (2, 4), (2, 7), (3, 6), (3, 11), (4, 8), (4, 16), (6, 12), (8, 32)]
SMALL = [(2, 1), (3, 2), (4, 3), (4, 4), (6, 5), (8, 8)]


def planned(name: str, ranks: int, microbatches: int, **options: object) -> Plan:
    strategy = Strategy(
        pipeline_parallel=ranks, num_microbatches=microbatches, directives=(directive(name, **options),)
    )
    return chain(24, rows=4 * microbatches).apply(strategy).check()


def live_activations(plan: Plan) -> dict[str, int]:
    """For each group the most forwards whose backward is not finished; of an overlap slot the forward counts first."""
    dag = plan.complete()
    peaks: dict[str, int] = {}
    for group, slots in linearize(dag).items():
        live = peak = 0
        for slot in slots:
            passes = [node.PASS for node in slot.nodes if isinstance(dag.nodes[node], Compute)]
            live += passes.count("F")
            peak = max(peak, live)
            live -= passes.count("B") + passes.count("BW")
        assert live == 0
        peaks[group] = peak
    return peaks


# -- bubbles: F=1, B=2, BI=BW=1 ----------
def bubble_1f1b(P, M):
    """Narayanan et al. 2021, section 2.2.1: (P-1)(F+B) on every rank."""
    return 3 * (P - 1) / (3 * M + 3 * (P - 1))


@pytest.mark.parametrize(("P", "M"), BIG + SMALL)
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Eager1F1B"])
def test_bubble_of_one_stage_per_rank(name, P, M):
    assert simulate(planned(name, P, M)).bubble == pytest.approx(bubble_1f1b(P, M))


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize(("P", "M"), [(1, 3), (2, 2), (2, 8), (3, 3), (4, 8), (4, 12), (8, 16)])
@pytest.mark.parametrize("order", ["depth_first", "breadth_first"])
def test_bubble_of_interleaved_stages(P, M, virtual, order):
    """Narayanan et al. 2021, section 2.2.2: that of 1F1B, divided by the number of virtual stages."""
    plan = planned("Interleaved1F1B", P, M, num_virtual_stages=virtual, interleaved_schedule=order)
    assert simulate(plan).bubble == pytest.approx((P - 1) / (virtual * M + P - 1))


@pytest.mark.parametrize(("P", "M"), [*BIG, (4, 4), (8, 8)])
def test_bubble_of_zbh1(P, M):
    """Qi et al. 2024, table 1: (P-1)(F+BI-BW) on every rank, from as many microbatches as stages."""
    assert simulate(planned("ZBH1", P, M)).makespan == 3 * M + (P - 1)


@pytest.mark.parametrize(("P", "M"), BIG)
def test_bubble_of_zbv(P, M):
    """Only the ramp of P-1 forwards of half stages is left, from 2P-1 microbatches."""
    assert simulate(planned("ZBV", P, M)).makespan == 6 * M + (P - 1)


@pytest.mark.parametrize(("P", "M"), BIG[1:])
def test_bubble_of_dualpipe_v(P, M):
    """DeepSeek-V3, table 2, with P = PP/2 ranks: (PP/2-1)(F&B + B - 3W) where F&B = F + B."""
    assert simulate(planned("DualPipeV", P, M)).makespan == 6 * M + 2 * (P - 1)


@pytest.mark.parametrize(("P", "M"), [(2, 4), (2, 10), (4, 8), (6, 16), (8, 16), (12, 24)])
def test_bubble_of_dualpipe(P, M):
    """DeepSeek-V3, table 2: (PP/2-1)(F&B + B - 3W) where F&B = F + B."""
    assert simulate(planned("DualPipe", P, M)).makespan == 3 * M + 2 * (P // 2 - 1)


# -- live activations, in stages of the model ----------
BOUNDS = {
    "GPipe": lambda P, M, s: M,
    "1F1B": lambda P, M, s: P - s,
    "Eager1F1B": lambda P, M, s: 2 * (P - s) - 1,
    "Interleaved1F1B": lambda P, M, s: 2 * (P - 1 - s) + P + 1,
    "ZBH1": lambda P, M, s: P,
    "ZBV": lambda P, M, s: 2 * P,
    "DualPipeV": lambda P, M, s: 2 * P + 1,
    "DualPipe": lambda P, M, s: P + 1,
}


@pytest.mark.parametrize("name", list(BOUNDS))
@pytest.mark.parametrize(("P", "M"), [(2, 4), (4, 8), (4, 16), (6, 24)])
def test_live_activations_stay_within_the_bound(name, P, M):
    peaks = live_activations(planned(name, P, M))
    for rank in range(P):
        assert peaks[f"g{rank}"] <= BOUNDS[name](P, M, rank)


# -- any counts ----------
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Eager1F1B", "ZBH1", "ZBV"])
@pytest.mark.parametrize(("P", "M"), SMALL)
def test_fewer_microbatches_than_stages_are_legal(name, P, M):
    planned(name, P, M)


@pytest.mark.parametrize(
    ("name", "P", "M", "text"),
    [
        ("Interleaved1F1B", 4, 6, "Interleaved1F1B takes a multiple of pipeline_parallel=4, not num_microbatches=6."),
        ("DualPipe", 4, 9, "DualPipe takes an even number from 8, not num_microbatches=9."),
        ("DualPipe", 4, 6, "DualPipe takes an even number from 8, not num_microbatches=6."),
        ("DualPipeV", 4, 3, "DualPipeV takes at least twice pipeline_parallel=4, not num_microbatches=3."),
        ("DualPipe", 3, 6, "DualPipe pairs ranks, so pipeline_parallel=3 must be even."),
    ],
)
def test_illegal_counts_name_the_rule(name, P, M, text):
    with pytest.raises(DirectiveError) as caught:
        planned(name, P, M)
    assert caught.value.what.partition(": ")[2] == text


@pytest.mark.parametrize(("P", "counts"), [(1, "2"), (3, "2 or 4"), (5, "4 or 6")])
def test_dualpipe_names_the_even_counts_beside(P, counts):
    with pytest.raises(DirectiveError) as caught:
        planned("DualPipe", P, 12)
    assert caught.value.help == f"use pipeline_parallel={counts}, or DualPipeV."


@pytest.mark.parametrize(
    ("name", "P", "M", "fix"),
    [
        ("Interleaved1F1B", 4, 6, "use num_microbatches=4 or 8."),
        ("Interleaved1F1B", 4, 3, "use num_microbatches=4."),
        ("DualPipe", 4, 9, "use num_microbatches=8 or 10."),
        ("DualPipeV", 4, 3, "use num_microbatches=8."),
        ("DualPipe", 3, 6, "use pipeline_parallel=2 or 4, or DualPipeV."),
    ],
)
def test_illegal_counts_name_the_nearest_legal_ones(name, P, M, fix):
    with pytest.raises(DirectiveError) as caught:
        planned(name, P, M)
    assert caught.value.help == fix


# -- two-way ----------
def test_dualpipe_keeps_every_stage_on_two_groups_and_reduces_it_once():
    plan = tied(4).apply(Strategy(pipeline_parallel=4, num_microbatches=8, directives=(directive("DualPipe"),))).check()
    dag = plan.complete()
    reductions = {node.bucket: node.group for node in dag.nodes.values() if getattr(node, "kind", "") == "all_reduce"}
    assert reductions == {
        "embedding": "g0+g3", "layers.0": "g0+g3", "layers.1": "g1+g2", "layers.2": "g1+g2", "layers.3": "g0+g3"
    }  # fmt: skip


# -- options ----------
OVERLAPPING = [("DualPipe", True), ("DualPipeV", True), ("Interleaved1F1B", False)]


@pytest.mark.parametrize(("name", "default"), OVERLAPPING)
def test_communication_overlap_makes_pairs_one_slot(name, default):
    def num_pairs(**options):
        return sum(len(slot.nodes) > 1 for slot in planned(name, 2, 8, **options).dag.slots)

    assert num_pairs(communication_overlap=True) > 8
    assert num_pairs(communication_overlap=False) == 0
    assert num_pairs() == num_pairs(communication_overlap=default)


def test_memory_optimization_is_activation_checkpointing():
    options = {
        "schedule": "interleaved_forward_backward",
        "communication_overlap": True,
        "memory_optimization": "activation_checkpointing",
    }
    plan = planned("DualPipe", 2, 4, **options)
    assert {op.remat for op in plan.dag.ops.values()} == {"nothing_saveable"}
    written = Strategy(pipeline_parallel=2, directives=(directive("DualPipe"), directive("ActivationCheckpointing")))
    assert chain(24, rows=16).apply(written).dag == plan.dag


def test_the_options_are_those_of_the_decorator_too():
    @directive(
        "DualPipe",
        schedule="interleaved_forward_backward",
        communication_overlap=True,
        memory_optimization="activation_checkpointing",
    )
    class Model:
        __piper_degrees__ = {"pipeline_parallel": 2, "num_microbatches": 4}

    plan = chain(2).apply(Strategy.of(Model)).check()
    assert {op.remat for op in plan.dag.ops.values()} == {"nothing_saveable"}
    assert any(len(slot.nodes) == 2 for slot in plan.dag.slots)


def test_activation_checkpointing_takes_a_policy_and_paths():
    some = directive("ActivationCheckpointing", policy="dots_saveable", path="layers.1")
    plan = chain(3).apply(Strategy(pipeline_parallel=3, num_microbatches=2, directives=(directive("1F1B"), some)))
    assert [op.remat for op in plan.dag.ops.values()] == [None, "dots_saveable", None]


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("1F1B", {"communication_overlap": True}, "option 'communication_overlap' means nothing to 1F1B"),
        (
            "DualPipe",
            {"interleaved_schedule": "depth_first"},
            "option 'interleaved_schedule' means nothing to DualPipe",
        ),
        ("DualPipeV", {"schedul": "x"}, "did you mean 'schedule'?"),
        ("DualPipeV", {"schedule": "interleaved"}, "did you mean 'interleaved_forward_backward'?"),
        ("DualPipe", {"communication_overlap": "yes"}, "use True or False."),
        ("Interleaved1F1B", {"interleaved_schedule": "depth-first"}, "did you mean 'depth_first'?"),
        ("ZBV", {"memory_optimization": "activation_checkpoint"}, "did you mean 'activation_checkpointing'?"),
        ("Interleaved1F1B", {"num_virtual_stages": 0}, "num_virtual_stages=0 is not a number from 1."),
        ("Interleaved1F1B", {"num_virtual_stages": True}, "num_virtual_stages=True is not a number from 1."),
    ],
)
def test_options_that_mean_nothing_are_errors_with_a_suggestion(name, options, text):
    with pytest.raises(DirectiveError) as caught:
        planned(name, 2, 4, **options)
    assert text in str(caught.value)


def test_a_schedule_covers_every_node():
    for name in BOUNDS:
        plan = planned(name, 2, 4)
        listed = [node for slot in plan.dag.slots for node in slot.nodes]
        assert len(listed) == len(set(listed))
        assert set(listed) == {name for name, node in plan.dag.nodes.items() if isinstance(node, Compute)}, name
