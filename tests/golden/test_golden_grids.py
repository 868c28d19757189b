"""Every schedule at unit costs is the grid beside this file.

``PIPER_UPDATE_GOLDEN=1 pytest tests/golden`` writes the files anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from traced_dags import chain, op, traced

from piper_jax import Strategy, directive, simulate
from piper_jax.visualization.grid import grid_text

SCHEDULES = {
    "gpipe": ("GPipe", 3, 4, {}),
    "eager_1f1b": ("Eager1F1B", 3, 6, {}),
    "interleaved_1f1b": ("Interleaved1F1B", 3, 6, {}),
    "interleaved_1f1b_breadth_first": ("Interleaved1F1B", 3, 6, {"interleaved_schedule": "breadth_first"}),
    "interleaved_1f1b_overlapped": ("Interleaved1F1B", 3, 6, {"communication_overlap": True}),
    "zbh1": ("ZBH1", 4, 6, {}),
    "zbv": ("ZBV", 3, 5, {}),
    "dualpipe": ("DualPipe", 4, 8, {}),
    "dualpipe_v": ("DualPipeV", 3, 6, {}),
    "dualpipe_v_without_overlap": ("DualPipeV", 3, 6, {"communication_overlap": False}),
    "zbh1_whole_stage": ("ZBH1", 4, 6, {}),
    "zbv_whole_stage": ("ZBV", 3, 5, {}),
    "dualpipe_v_whole_stage": ("DualPipeV", 3, 6, {}),
}


def layers(rows, whole):
    """Six equal layers; the backward of the layers in ``whole`` cannot be split."""
    ops = [op(f"layers.{i}", i, splittable=i not in whole) for i in range(6)]
    return traced(ops, [(f"layers.{i}", f"layers.{i + 1}", f"add.{i}") for i in range(5)], rows=rows)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_grid(name):
    schedule, ranks, microbatches, options = SCHEDULES[name]
    strategy = Strategy(
        pipeline_parallel=ranks, num_microbatches=microbatches, directives=(directive(schedule, **options),)
    )
    whole = {"zbh1_whole_stage": (2, 3), "zbv_whole_stage": (2,), "dualpipe_v_whole_stage": (3, 4)}.get(name)
    plan = (layers(microbatches, whole) if whole else chain(6, rows=microbatches)).apply(strategy).check()
    text = grid_text(simulate(plan, title=name)) + "\n"
    path = Path(__file__).with_name(f"grid_{name}.txt")
    if os.environ.get("PIPER_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; see the docstring of this file"
