"""XLA compilations and first-call time of 8 equal layers on 4 stages, the latter as a ratio to plain ``jax.jit``.

Compilations are counted twice: by the compiler of the plan, and by JAX's own compile events, split by phase. First
calls are timed in fresh processes, in turn: from the model to the first loss.

Run: ``python benchmarks/compile_count.py [rounds]``
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
STAGES, MICROBATCHES = 4, 8
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={STAGES}"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
from block_stack import PlainStep, block_stack, loss_fn, optimizer, random_batch

import piper_jax as piper

LAYERS, DIM, LENGTH, BATCH = 8, 256, 64, 32
COMPILED = "/jax/core/compile/backend_compile_duration"


class Phases:
    """Wall seconds and XLA compilations of consecutive parts of a program."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.compiles: dict[str, int] = {}
        self._compiled, self._start = 0, time.perf_counter()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        self._compiled += event == COMPILED

    def ended(self, phase: str) -> None:
        """Books everything since the last call under ``phase``."""
        now = time.perf_counter()
        self.seconds[phase], self.compiles[phase] = now - self._start, self._compiled
        self._compiled, self._start = 0, time.perf_counter()


def first_pipelined_call() -> dict[str, Any]:
    """Trace, plan, compile, place and run one step."""
    model, batch = block_stack(LAYERS, DIM), random_batch(BATCH, LENGTH, DIM)
    strategy = piper.Strategy(pipeline_parallel=STAGES, num_microbatches=MICROBATCHES)
    phases = Phases()
    plan = piper.trace(loss_fn, model, batch, optimizer=optimizer()).apply(strategy)
    phases.ended("trace and plan")
    train = piper.compile(plan)
    phases.ended("compile")
    state = jax.block_until_ready(train.init(model))
    phases.ended("init")
    state, metrics = train.step(state, batch)
    jax.block_until_ready((state, metrics))
    phases.ended("first step")
    jax.block_until_ready(train.step(state, batch))
    phases.ended("second step")
    labels: dict[str, set[str]] = {}
    for found in train.instructions():
        if found.program is not None:
            labels.setdefault(found.program.digest[:8], set()).add(found.label)
    return {
        "seconds": phases.seconds,
        "compiles": phases.compiles,
        "num_compiles": train.compiler.num_compiles,
        "num_shared": train.compiler.num_shared,
        "programs": [", ".join(sorted(found)) for found in labels.values()],
    }


def first_plain_call() -> dict[str, Any]:
    """Compile and run one step of plain ``jax.jit``."""
    model, batch = block_stack(LAYERS, DIM), random_batch(BATCH, LENGTH, DIM)
    phases = Phases()
    plain = PlainStep(model, MICROBATCHES)
    jax.block_until_ready(plain.state)
    phases.ended("init")
    jax.block_until_ready((plain(batch), plain.state))
    phases.ended("first step")
    jax.block_until_ready((plain(batch), plain.state))
    phases.ended("second step")
    return {"seconds": phases.seconds, "compiles": phases.compiles}


def _in_fresh_process(kind: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, kind], capture_output=True, text=True, check=True, timeout=600)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    runs = [(_in_fresh_process("pipelined"), _in_fresh_process("plain")) for _ in range(rounds)]
    ours, theirs = zip(*runs, strict=True)
    print(f"{LAYERS} blocks, d={DIM}, 1F1B, {STAGES} stages, {MICROBATCHES} microbatches, {os.cpu_count()} cores")
    print(f"{'':24}{'compilations':>14}{'seconds':>9}")
    for phase in ours[0]["seconds"]:
        print(f"{phase:24}{ours[0]['compiles'][phase]:14}{_median(ours, phase):9.2f}")
    for phase in ("init", "first step"):
        print(f"{'jax.jit ' + phase:24}{theirs[0]['compiles'][phase]:14}{_median(theirs, phase):9.2f}")
    compiles, shared = ours[0]["num_compiles"], ours[0]["num_shared"]
    print(f"compiler of the plan: {compiles} compilations, {shared} programs re-used one;")
    print(f"a step runs {len(ours[0]['programs'])} distinct programs:")
    for program in ours[0]["programs"]:
        print(f"    {program}")
    ratios = [_total(a) / _total(b) for a, b in zip(ours, theirs, strict=True)]
    print(f"first call, ratio to jax.jit   {statistics.median(ratios):.2f}")


def _median(found: Any, phase: str) -> float:
    return statistics.median(f["seconds"][phase] for f in found)


def _total(found: dict[str, Any]) -> float:
    return sum(s for phase, s in found["seconds"].items() if phase != "second step")


if __name__ == "__main__":
    kinds = {"pipelined": first_pipelined_call, "plain": first_plain_call}
    if sys.argv[1:2] and sys.argv[1] in kinds:
        print(json.dumps(kinds[sys.argv[1]]()))
    else:
        main()
