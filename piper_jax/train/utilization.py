"""Model FLOPs utilization: what the model needs, as a part of what the devices could do (arXiv 2204.02311)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import piper_jax as piper
from piper_jax.simulation.hardware import HARDWARE
from piper_jax.topology import topology_of
from piper_jax.train.comparison import precision_of
from piper_jax.train.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """The formula, with its numbers; what is computed twice under rematerialization counts once.

    Attributes:
      active_parameters: N, by which each token is multiplied.
      attention_width: A, layers x heads x width of a head.
      sequence_length: T; every position counts as if it attended to all.
      num_devices: of the plan.
      peak_flops: per second of one device; None where it is not known.
      source: of the peak, or why there is none.
    """

    active_parameters: int
    attention_width: int
    sequence_length: int
    num_devices: int
    peak_flops: float | None
    source: str

    @classmethod
    def of(cls, job: Job, plan: piper.Plan) -> Utilization:
        """That of a job on the devices that JAX finds."""
        peak, source = peak_of(job.config.logging.peak_flops, jax.devices(), precision_of(plan))
        leaves = jax.tree.leaves(job.model.shapes())
        return cls(
            active_parameters=job.model.num_active_parameters or sum(int(np.prod(leaf.shape)) for leaf in leaves),
            attention_width=job.model.attention_width,
            sequence_length=job.config.train.sequence_length,
            num_devices=job.strategy.num_devices,
            peak_flops=peak,
            source=source,
        )

    @property
    def flops_per_token(self) -> int:
        """Of a forward and a backward pass."""
        return 6 * self.active_parameters + 12 * self.attention_width * self.sequence_length

    def __call__(self, tokens_per_second: float) -> float | None:
        """The part of the peak that is used, in [0, 1]; None where the peak is not known."""
        if self.peak_flops is None:
            return None
        return tokens_per_second * self.flops_per_token / (self.num_devices * self.peak_flops)

    def __str__(self) -> str:
        count = f"N = {self.active_parameters:,} active parameters"
        attention = f" + 12 x {self.attention_width:,} x {self.sequence_length:,}" if self.attention_width else ""
        if self.peak_flops is None:
            return f"{count}; no MFU: {self.source}"
        peak = f"({self.num_devices} x {self.peak_flops:.3g} FLOP/s, {self.source})"
        return f"(6 N{attention}) x tokens/s / {peak}, {count}"


def peak_of(given: float | None, devices: Sequence[Any], dtype: str) -> tuple[float | None, str]:
    """Floating-point operations per second of one device: as given, or those of its profile; and where that is from."""
    if given is not None:
        return given, "logging.peak_flops"
    kind = topology_of(devices).kind
    if devices[0].platform == "cpu" or kind not in HARDWARE:
        return None, f"the peak of {devices[0].device_kind} is not known; logging.peak_flops=... gives it"
    return HARDWARE[kind].peak(dtype), f"{dtype} on {kind}"
