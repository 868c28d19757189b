"""Follows the devices one step behind, so that they never wait for the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from piper_jax.optimizers import OBSERVED
from piper_jax.recording import Recorder
from piper_jax.train.metrics import Meter, StepMetrics
from piper_jax.train.progress import Display

Summary = Callable[[Mapping[str, Any]], Mapping[str, float]]


class Follower:
    """Reads the metrics of a step after the next one was dispatched; shows and records them.

    Args:
      summary: metrics of a step -> what is shown beside the loss, by name.
      utilization: tokens per second -> MFU, or None.
    """

    def __init__(
        self,
        *,
        meter: Meter,
        display: Display,
        recorder: Recorder,
        summary: Summary | None = None,
        utilization: Callable[[float], float | None] = lambda _: None,
    ):
        self._meter, self._display, self._recorder = meter, display, recorder
        self._summary, self._utilization = summary, utilization
        self._waiting: tuple[int, Mapping[str, Any]] | None = None

    def dispatched(self, step: int, metrics: Mapping[str, Any]) -> StepMetrics | None:
        """Takes the metrics of a step that may still run, and reads those of the one before.

        Args:
          metrics: arrays by name; ``loss``, those of ``OBSERVED``, and others.

        Returns:
          The step before, which is done; None after the first one.
        """
        for array in jax.tree.leaves(metrics):
            array.copy_to_host_async()
        before, self._waiting = self._waiting, (step, metrics)
        return None if before is None else self._read(*before)

    def catch_up(self) -> StepMetrics | None:
        """Waits for the last step that was dispatched; None if it was read before."""
        before, self._waiting = self._waiting, None
        return None if before is None else self._read(*before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For what waits for the devices, such as an evaluation: it follows the last step, and no rate counts it."""
        self.catch_up()
        yield
        self._meter.restarted()

    def _read(self, step: int, metrics: Mapping[str, Any]) -> StepMetrics:
        values = jax.device_get(metrics)
        rate = self._meter.step_ended()
        found = StepMetrics(
            step=step,
            loss=float(values["loss"]),
            tokens_per_second=rate,
            mfu=None if rate is None else self._utilization(rate),
            peak_bytes=_peak_bytes(),
            named={} if self._summary is None else self._summary(values),
            **{name: float(values[name]) if name in values else math.nan for name in OBSERVED},
        )
        self._display.step(found)
        self._recorder.record(step, found.numbers)
        return found


def _peak_bytes() -> int | None:
    """The most that any device of this process has held so far; None where the platform does not count."""
    counted = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    return max((stats["peak_bytes_in_use"] for stats in counted if "peak_bytes_in_use" in stats), default=None)
