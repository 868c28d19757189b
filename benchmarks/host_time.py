"""Host time of the executor, in microseconds above bare ``jax.jit`` calls and transfers of the same arity.

The model computes next to nothing. The bare sequence has one call for each instruction of the step, with as many inputs
and outputs of the same shapes and shardings: a jitted function that returns constants for a program, ``jax.device_put``
for a transfer. Both sequences run in turn in one process, each until its last value is there.

Run: ``python benchmarks/host_time.py [data_parallel] [rounds]``
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
DATA_PARALLEL = int(sys.argv[1]) if len(sys.argv) > 1 else 1
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 15
STAGES, MICROBATCHES = 4, 8
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={STAGES * DATA_PARALLEL}"

import jax
import jax.numpy as jnp
from block_stack import PipelinedStep, perceptron_stack, random_batch
from measuring import compare

import piper_jax as piper

LAYERS, DIM, BATCH = 8, 4, 16
STEPS_IN_A_SAMPLE = 20


def bare_sequence(instructions: Sequence[Any]) -> Callable[[], Any]:
    """One call for each instruction, on arrays made beforehand."""
    outputs = {
        key: spec
        for found in instructions
        if found.role == "compute"
        for key, spec in zip(found.writes, found.program.executable.out_info, strict=True)
    }
    programs = {id(found.program): found.program.executable for found in instructions if found.program}
    bare = {key: _bare_program(executable) for key, executable in programs.items()}
    calls = [
        bare[id(found.program)] if found.program else _bare_move(found, [outputs[k] for k in found.reads])
        for found in instructions
    ]

    def run() -> Any:
        results = None
        for call, arrays in calls:
            results = call(*arrays)
        return results

    return run


def _bare_program(executable: jax.stages.Compiled) -> tuple[Callable[..., Any], list[jax.Array]]:
    (inputs, _), (shardings, _) = executable.args_info, executable.input_shardings
    arrays = [jax.device_put(jnp.zeros(i.shape, i.dtype), s) for i, s in zip(inputs, shardings, strict=True)]
    function = jax.jit(
        lambda *_: tuple(jnp.zeros(o.shape, o.dtype) for o in executable.out_info),
        in_shardings=tuple(shardings),
        out_shardings=tuple(executable.output_shardings),
        keep_unused=True,
    )
    return function, arrays


def _bare_move(found: Any, specs: Sequence[Any]) -> tuple[Callable[..., Any], list[jax.Array]]:
    if not specs:
        return found.call, []
    arrays = [jax.device_put(jnp.zeros(s.shape, s.dtype), s.sharding) for s in specs]
    targets = [moved.sharding for moved in found.call(*arrays)]
    return (lambda *given: jax.device_put(list(given), targets)), arrays


def main() -> None:
    strategy = piper.Strategy(data_parallel=DATA_PARALLEL, pipeline_parallel=STAGES, num_microbatches=MICROBATCHES)
    batch = random_batch(BATCH, DIM)
    pipelined = PipelinedStep(perceptron_stack(LAYERS, DIM), batch, strategy)
    instructions = pipelined.train.instructions()
    bare = bare_sequence(instructions)
    jax.block_until_ready((pipelined(batch), bare()))
    found = compare(lambda: (pipelined(batch), pipelined.state), bare, rounds=ROUNDS, calls=STEPS_IN_A_SAMPLE)
    tasks = sum(len(i.nodes) for i in instructions if i.role == "compute")
    transfers = sum(i.role == "transfer" for i in instructions)
    above, above_cpu = found.difference_seconds * 1e6, found.cpu_difference_seconds * 1e6
    ours, theirs = (s * 1e6 for s in found.seconds)
    print(f"{LAYERS} layers, d={DIM}, {DATA_PARALLEL} data x {STAGES} pipeline, {os.cpu_count()} cores")
    print(f"{tasks} tasks (F or B of a microbatch) in {len(instructions)} instructions, {transfers} of them transfers")
    print(f"train.step                    {ours:6.0f} us, {ours / tasks:.0f} us a task")
    print(f"bare calls of the same arity  {theirs:6.0f} us, {theirs / tasks:.0f} us a task")
    print(f"ratio                         {found}")
    print(f"above bare, an instruction    {above / len(instructions):6.1f} us")
    print(f"above bare, a task            {above / tasks:6.1f} us   (all of train.step counted)")
    print(f"the same in processor time    {above_cpu / tasks:6.1f} us")


if __name__ == "__main__":
    main()
