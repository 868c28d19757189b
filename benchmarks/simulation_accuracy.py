"""Simulated step time, with costs that are measured on this machine, beside the step as it runs, in one process.

A round measures the step and then its costs: every distinct program and transfer alone, and the passes of all groups
together. The simulated step is the makespan with these costs and what a step does outside its nodes.

Run: ``python benchmarks/simulation_accuracy.py [rounds] [dim] [length] [schedule ...]``
"""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
STAGES, MICROBATCHES = 4, 8
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={STAGES}"

from block_stack import PipelinedStep, block_stack, random_batch
from measuring import Comparison, Sample, comparison, sample, wait_until_idle

import piper_jax as piper

ROUNDS, DIM, LENGTH = (int(given) for given in (*sys.argv[1:4], *("12", "256", "64")[len(sys.argv[1:4]) :]))
SCHEDULES = sys.argv[4:] or ["1F1B", "ZBH1", "DualPipeV"]
LAYERS, BATCH = 8, 32
STEPS_IN_A_SAMPLE, CALLS_OF_A_PROGRAM = 3, 3


def measured(schedule: str) -> tuple[Comparison, list[piper.simulation.MeasuredCosts]]:
    """Rounds of simulated and real seconds of a step, and the costs of each round."""
    model, batch = block_stack(LAYERS, DIM), random_batch(BATCH, LENGTH, DIM)
    strategy = piper.Strategy(
        pipeline_parallel=STAGES, num_microbatches=MICROBATCHES, directives=[piper.directive(schedule)]
    )
    step = PipelinedStep(model, batch, strategy)
    train, costs = step.train, list[piper.simulation.MeasuredCosts]()
    sample(lambda: (step(batch), step.state), 3)
    found: list[tuple[Sample, Sample]] = []
    for _ in range(ROUNDS):
        wait_until_idle()
        real = sample(lambda: (step(batch), step.state), STEPS_IN_A_SAMPLE)
        probe = sample(lambda: costs.append(train.measure_costs(step.state, batch, rounds=CALLS_OF_A_PROGRAM)))
        seconds = piper.simulate(train.plan, costs=costs[-1]).makespan + costs[-1].outside_seconds
        found.append((replace(probe, seconds=seconds), real))
    return comparison(found), costs


def main() -> None:
    print(f"{LAYERS} blocks, d={DIM}, {BATCH} x {LENGTH} tokens, {STAGES} stages, {MICROBATCHES} microbatches,")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    print(f"{'':10} {'real':>8} {'simulated':>10} {'ratio':>6}   median over rounds of the ratio within a round")
    for schedule in SCHEDULES:
        found, costs = measured(schedule)
        simulated, real = found.seconds
        shared = statistics.median(c.num_processors or STAGES for c in costs)
        print(f"{schedule:10} {real:6.3f} s {simulated:8.3f} s {simulated / real:6.3f}   {found}")
        print(
            f"{'':10} {shared:.2f} groups at once, {statistics.median(c.outside_seconds for c in costs):.4f} s outside"
        )
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
