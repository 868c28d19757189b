"""Step time under 1F1B as a ratio to plain ``jax.jit`` of the same work on one device, measured in turn in one process.

Run: ``python benchmarks/step_time.py [data_parallel] [rounds]``; 2 as first argument is 2 data x 4 pipeline.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
DATA_PARALLEL = int(sys.argv[1]) if len(sys.argv) > 1 else 1
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 15
STAGES, MICROBATCHES = 4, 8
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={STAGES * DATA_PARALLEL}"

from block_stack import PipelinedStep, PlainStep, block_stack, random_batch
from measuring import compare

import piper_jax as piper

LAYERS, DIM, LENGTH, BATCH = 8, 256, 64, 32
WARM_UP_STEPS = 2


def main() -> None:
    model, batch = block_stack(LAYERS, DIM), random_batch(BATCH, LENGTH, DIM)
    strategy = piper.Strategy(
        data_parallel=DATA_PARALLEL,
        pipeline_parallel=STAGES,
        num_microbatches=MICROBATCHES,
        directives=[piper.directive("1F1B")],
    )
    pipelined, plain = PipelinedStep(model, batch, strategy), PlainStep(model, MICROBATCHES)
    for _ in range(WARM_UP_STEPS):
        losses = float(pipelined(batch)), float(plain(batch))
    found = compare(lambda: (pipelined(batch), pipelined.state), lambda: (plain(batch), plain.state), rounds=ROUNDS)
    print(f"{LAYERS} blocks, d={DIM}, {BATCH} x {LENGTH} tokens, {MICROBATCHES} microbatches, {os.cpu_count()} cores")
    print(f"1F1B, {DATA_PARALLEL} data x {STAGES} pipeline   {found.seconds[0]:.3f} s a step")
    print(f"plain jax.jit, one device   {found.seconds[1]:.3f} s a step")
    print(f"losses after {WARM_UP_STEPS} steps       {losses[0]:.6f} and {losses[1]:.6f}")
    print(f"ratio                       {found}")
    print(f"ratio of processor time     {found.cpu_ratio:.3f}")


if __name__ == "__main__":
    main()
