"""A planned step beside the same step on one device: loss and every gradient leaf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import piper_jax as piper
from piper_jax.data.batches import Batch
from piper_jax.runtime.reference import TOLERANCES, reference_gradients
from piper_jax.runtime.whole_program import at_64_bits
from piper_jax.train.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One leaf.

    Attributes:
      name: ``loss``, or the path of a gradient.
      scale: the largest absolute value of the reference.
      relative: the largest absolute difference, as a fraction of ``scale``.
    """

    name: str
    scale: float
    relative: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All leaves, the loss first.

    Attributes:
      precision: row of the table of tolerances: the narrowest dtype that the model computes in.
      tolerance: bound of ``relative``.
    """

    differences: tuple[Difference, ...]
    precision: str
    tolerance: float

    @property
    def exceeding(self) -> tuple[Difference, ...]:
        """Leaves that differ by more than the tolerance, or are not finite."""
        return tuple(d for d in self.differences if not d.relative <= self.tolerance)

    @property
    def worst(self) -> tuple[Difference, ...]:
        """All leaves, the largest relative difference first; what is not finite leads."""
        return tuple(sorted(self.differences, key=lambda d: -np.nan_to_num(d.relative, nan=np.inf)))


def compare_with_one_device(job: Job, plan: piper.Plan, batch: Batch) -> Comparison:
    """Runs one step of the plan and of the reference, from the same parameters, key and batch.

    Args:
      plan: of the job, placed and ordered.

    Raises:
      RuntimeFault: too few devices.
    """
    params, seed = job.parameters(), job.config.train.seed
    train = piper.compile(plan, devices=job.device_map(plan))
    state = train.init(params, seed)
    gradients = train.gradients(state, batch)
    _, metrics = train.step(state, batch)
    loss, expected = reference_gradients(
        job.model.loss_fn,
        params,
        batch,
        num_microbatches=plan.num_microbatches,
        num_replicas=job.strategy.data_parallel * job.strategy.expert_parallel,
        key=jax.random.key(seed),
        step=0,
    )
    precision = precision_of(plan)
    return Comparison(
        differences=(_difference("loss", metrics["loss"], loss), *_leaf_differences(gradients, expected)),
        precision=precision,
        tolerance=TOLERANCES[precision],
    )


def _leaf_differences(found: Any, expected: Any) -> list[Difference]:
    pairs = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True)
    return [_difference(jax.tree_util.keystr(path, simple=True, separator="."), b, a) for (path, a), b in pairs]


def _difference(name: str, found: Any, expected: Any) -> Difference:
    left, right = (at_64_bits(value) for value in (found, expected))
    scale, difference = np.abs(right).max(initial=0.0), np.abs(left - right).max(initial=0.0)
    relative = 0.0 if difference == 0 else np.inf if scale == 0 else difference / scale
    return Difference(name=name.removesuffix(".value"), scale=float(scale), relative=float(relative))


def precision_of(plan: piper.Plan) -> str:
    """The row of the table for the narrowest floating-point dtype that the traced loss computes in."""
    computed_in = {str(aval.dtype) for aval in plan.source.program.flat.avals}
    return next((name for name in reversed(TOLERANCES) if name in computed_in), "float32")
