"""Seconds that the core needs for a plan of 100,000 nodes, from building to saving.

Run: ``PYTHONPATH=tests python benchmarks/core_scale.py [num_nodes]``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from traced_dags import chain

import piper_jax as piper
from piper_jax import where
from piper_jax.ir.linear import linearize
from piper_jax.planning import Plan, StrategyOptions, find_strategy, load_plan

STAGES = 64
NODES_PER_STAGE_AND_MICROBATCH = 6


def planned(num_stages: int, num_microbatches: int, seconds: dict[str, float]) -> Plan:
    """A 1F1B plan, each directive timed."""

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    strategy = piper.Strategy(pipeline_parallel=num_stages, data_parallel=8, num_microbatches=num_microbatches)
    with timed("build"):
        plan = chain(2 * num_stages, rows=8 * num_microbatches)
    with timed("split, place and order by 1F1B"):
        plan = find_strategy("1F1B").function(plan, StrategyOptions.of(strategy, {}))
    with timed("replicate"):
        plan = plan.replicate(where(), axes=("data",), shard_optimizer=True)
    with timed("complete"):
        plan.complete()
    with timed("check"):
        plan.check()
    with timed("linearize"):
        linearize(plan.complete())
    with timed("save"), tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
    return plan


def main() -> None:
    num_nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    seconds: dict[str, float] = {}
    plan = planned(STAGES, -(-num_nodes // (STAGES * NODES_PER_STAGE_AND_MICROBATCH)) + 4, seconds)
    for name, spent in seconds.items():
        print(f"{name:32} {spent:6.2f} s")
    dag = plan.complete()
    print(f"{len(dag.nodes):,} nodes, {len(dag.data):,} edges: {sum(seconds.values()):.2f} s in all")
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        start = time.perf_counter()
        load_plan(Path(folder) / "plan.json")
        print(f"loading it again                 {time.perf_counter() - start:6.2f} s")


if __name__ == "__main__":
    main()
