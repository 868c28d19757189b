"""The core holds plans of 100,000 nodes; ``benchmarks/core_scale.py`` prints the seconds."""

from __future__ import annotations

import pytest

from benchmarks.core_scale import STAGES, planned
from benchmarks.schedule_scale import STAGES_PER_RANK, simulated
from piper_jax.ir.linear import linearize
from piper_jax.ir.nodes import Compute


@pytest.mark.timeout(120)
def test_a_plan_of_100_000_nodes_is_built_rewritten_completed_checked_ordered_and_saved():
    num_microbatches = 265
    plan = planned(STAGES, num_microbatches, {})
    dag = plan.complete()
    assert len(dag.nodes) > 100_000
    assert sum(isinstance(node, Compute) for node in dag.nodes.values()) == 2 * STAGES * num_microbatches
    assert sum(len(slots) for slots in linearize(dag).values()) == len(dag.nodes)
    assert len(str(plan)) < 30_000


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", list(STAGES_PER_RANK))
def test_64_stages_and_512_microbatches_with_split_backward_are_planned_checked_and_simulated(name):
    num_nodes, report = simulated(name, 64, 512, {})
    assert num_nodes > 190_000
    assert report.bubble < 0.04
