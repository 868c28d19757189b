"""A plan on this machine: its measured costs, and the step that they should explain."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import piper_jax as piper
from piper_jax.simulation import MeasuredCosts, Report
from piper_jax.train.job import Job

WARM_UP_STEPS, STEPS_BEFORE, STEPS_AFTER = 2, 4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was measured.

    Attributes:
      step_seconds: of single steps, from the call until the new state is there.
    """

    costs: MeasuredCosts
    step_seconds: tuple[float, ...]

    def beside(self, simulated: Report) -> str:
        """The real and the simulated step, in words."""
        real, outside = statistics.median(self.step_seconds), self.costs.outside_seconds
        seconds = simulated.makespan + outside
        spread = f"{_text(min(self.step_seconds))} to {_text(max(self.step_seconds))}"
        return (
            f"real step       {_text(real)}, median of {len(self.step_seconds)}: {spread}\n"
            f"simulated step  {_text(seconds)}, {seconds / real:.2f} of it: "
            f"makespan {_text(simulated.makespan)}, outside the plan {_text(outside)}"
        )


def measure_job(job: Job, plan: piper.Plan) -> Measurement:
    """Compiles a plan and measures steps and costs in turn, on a batch of zeros.

    Args:
      plan: of the job, placed and ordered.

    Raises:
      RuntimeFault: too few devices.
    """
    train = piper.compile(plan, devices=job.device_map(plan))
    state = train.init(job.parameters(), job.config.train.seed)
    batch = {name: np.zeros(spec.shape, spec.dtype) for name, spec in job.batch_shapes().items()}

    def steps(state: Any, count: int) -> tuple[Any, list[float]]:
        seconds: list[float] = []
        for _ in range(count):
            begin = time.perf_counter()
            state, metrics = train.step(state, batch)
            jax.block_until_ready((state, metrics))
            seconds.append(time.perf_counter() - begin)
        return state, seconds

    state, _ = steps(state, WARM_UP_STEPS)
    state, before = steps(state, STEPS_BEFORE)
    costs = train.measure_costs(state, batch)
    state, after = steps(state, STEPS_AFTER)
    return Measurement(costs=costs, step_seconds=(*before, *after))


def _text(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
