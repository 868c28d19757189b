"""Step time and bytes at rest under ZeRO as ratios to plain data parallelism, measured in turn in one process.

Run: ``python benchmarks/zero_step.py [rounds] [data_parallel] [pipeline_parallel]``.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
ROUNDS, DATA_PARALLEL, STAGES = (
    int(argument) if argument else default
    for argument, default in zip([*sys.argv[1:4], None, None, None], (9, 2, 4), strict=False)
)
MICROBATCHES = 8
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={STAGES * DATA_PARALLEL}"

from block_stack import PipelinedStep, block_stack, random_batch
from measuring import compare

import piper_jax as piper

LAYERS, DIM, LENGTH, BATCH = 8, 256, 64, 32
WARM_UP_STEPS = 2


def pipelined(stage: int, model: object, batch: dict[str, object]) -> PipelinedStep:
    """1F1B with ZeRO of a stage, after its first steps."""
    directives = [piper.directive("1F1B"), *([piper.directive(f"ZeRO-{stage}")] if stage else [])]
    strategy = piper.Strategy(
        data_parallel=DATA_PARALLEL, pipeline_parallel=STAGES, num_microbatches=MICROBATCHES, directives=directives
    )
    step = PipelinedStep(model, batch, strategy)  # type: ignore[arg-type]
    for _ in range(WARM_UP_STEPS):
        step(batch)
    return step


def both(step: PipelinedStep, batch: dict[str, object]) -> object:
    """The loss of one step and the state after it, to wait for."""
    return step(batch), step.state


def bytes_at_rest(step: PipelinedStep) -> int:
    """Parameters, optimizer state and gradient accumulators on the first device."""
    device = step.train.devices[0]
    arrays = (*step.state.arrays, *step.train._accumulators.values())
    return sum(s.data.nbytes for a in arrays for s in a.addressable_shards if s.device == device)


def main() -> None:
    model, batch = block_stack(LAYERS, DIM), random_batch(BATCH, LENGTH, DIM)
    plain = pipelined(0, model, batch)
    print(f"{LAYERS} blocks, d={DIM}, {BATCH} x {LENGTH} tokens, {DATA_PARALLEL} data x {STAGES} pipeline, 1F1B")
    print(f"ZeRO-0   {bytes_at_rest(plain) / 2**20:.2f} MiB at rest")
    for stage in (1, 2, 3):
        sharded = pipelined(stage, model, batch)
        found = compare(partial(both, sharded, batch), partial(both, plain, batch), rounds=ROUNDS)
        held = bytes_at_rest(sharded)
        print(f"ZeRO-{stage}   {held / 2**20:.2f} MiB at rest, {held / bytes_at_rest(plain):.3f} of ZeRO-0;")
        print(f"         step {found.seconds[0]:.3f} s, ratio {found}, processor time {found.cpu_ratio:.3f}")


if __name__ == "__main__":
    main()
