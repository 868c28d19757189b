"""DualPipeV against 1F1B as simulated, in the settings of arXiv 2606.11169: A100 nodes joined by EFA.

    python benchmarks/paper_settings.py [hardware] [rows of a slice] [key=value of the configurations ...]

The mixtures of 1 and 9 billion parameters on 8 x 4 and 4 x 4 devices (pipeline x expert), 2 x pipeline microbatches.
Compiles and measures nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import piper_jax as piper
from piper_jax.config import load_config
from piper_jax.simulation.hardware import hardware_profile
from piper_jax.train.job import Job

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SETTINGS = {"qwen3_moe_1b_dualpipev.yaml": 1.13, "qwen3_moe_9b_dualpipev.yaml": 1.10}  # the paper's ratio to 1F1B
SCHEDULES = {
    "1F1B": "[1F1B]",
    "Interleaved1F1B": "[Interleaved1F1B]",
    "DualPipeV, no slot of two passes": "[{name: DualPipeV, communication_overlap: false}]",
    "DualPipeV": "[DualPipeV]",
}


def main(hardware: str = "p4d", rows: str = "1", *overrides: str) -> None:
    """Prints a table for each model."""
    capacity = hardware_profile(hardware).memory_bytes
    for name, published in SETTINGS.items():
        base = load_config(CONFIGS / name, overrides)
        preset, degrees, length = base.model.arguments["preset"], base.strategy, base.train.sequence_length
        ranks, experts, number = degrees.pipeline_parallel, degrees.expert_parallel, degrees.num_microbatches
        print(f"{preset}: pipeline {ranks} x expert {experts}, {number} microbatches, {rows} x {length} tokens a slice")
        print(f"  {hardware} {' '.join(overrides)}; the paper measured {published:.2f}")
        print(f"  {'schedule':33} {'step':>9} {'bubble':>7} {'peak':>9}  throughput")
        size, reference = int(rows) * number * experts, None
        for schedule, directives in SCHEDULES.items():
            changes = [f"train.batch_size={size}", f"strategy.directives={directives}", *overrides]
            report = piper.simulate(Job.of(load_config(CONFIGS / name, changes)).plan(), hardware=hardware)
            reference = reference or report.makespan
            step, gigabytes = f"{report.makespan * 1e3:6.1f} ms", report.peak_bytes / 2**30
            over = " (more memory than there is)" if report.peak_bytes > capacity else ""
            ratio = f"{reference / report.makespan:.3f}{over}"
            print(f"  {schedule:33} {step} {report.bubble:7.3f} {gigabytes:5.1f} GiB  {ratio}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
