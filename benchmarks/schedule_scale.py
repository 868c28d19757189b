"""CPU seconds and memory to plan, check and simulate large schedules with split backward: 64 stages x 512 microbatches.

Run: ``PYTHONPATH=.:tests python benchmarks/schedule_scale.py [stages microbatches]``.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from traced_dags import chain

import piper_jax as piper
from piper_jax.simulation import Report

STAGES, MICROBATCHES = 64, 512
STAGES_PER_RANK = {"ZBH1": 1, "ZBV": 2, "DualPipeV": 2, "DualPipe": 1}


def simulated(name: str, stages: int, microbatches: int, seconds: dict[str, float]) -> tuple[int, Report]:
    """The number of nodes and the report of one schedule; ``seconds`` is filled with the CPU time of each step."""

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        start = time.process_time()
        yield
        seconds[what] = time.process_time() - start

    strategy = piper.Strategy(
        pipeline_parallel=stages // STAGES_PER_RANK[name],
        num_microbatches=microbatches,
        directives=(piper.directive(name),),
    )
    plan = chain(2 * stages, rows=microbatches)
    with timed("plan"):
        plan = plan.apply(strategy)
    with timed("complete"):
        num_nodes = len(plan.complete().nodes)
    with timed("check"):
        plan.check()
    with timed("simulate"):
        report = piper.simulate(plan, title=name)
    return num_nodes, report


def main() -> None:
    stages, microbatches = (int(word) for word in sys.argv[1:3]) if len(sys.argv) > 2 else (STAGES, MICROBATCHES)
    print(f"{stages} stages x {microbatches} microbatches, CPU seconds")
    print(
        f"{'schedule':10} {'nodes':>8} {'plan':>6} {'complete':>9} {'check':>6} {'simulate':>9} {'in all':>7}  bubble"
    )
    for name in STAGES_PER_RANK:
        seconds: dict[str, float] = {}
        num_nodes, report = simulated(name, stages, microbatches, seconds)
        columns = (f"{seconds[what]:{width}.2f}" for what, width in zip(seconds, (6, 9, 6, 9), strict=True))
        print(f"{name:10} {num_nodes:8,} {' '.join(columns)} {sum(seconds.values()):7.2f}  {report.bubble:.3f}")
    print(f"largest memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
