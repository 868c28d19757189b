"""The loop runs one step ahead of what it reads."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from piper_jax.recording import Recorder
from piper_jax.train.following import Follower
from piper_jax.train.metrics import Meter, StepMetrics


class Seen:
    """A sink and a display that remember."""

    def __init__(self):
        self.recorded: list[tuple[int, Mapping[str, float]]] = []
        self.shown: list[StepMetrics] = []

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self.recorded.append((step, values))

    def step(self, metrics: StepMetrics) -> None:
        self.shown.append(metrics)


def metrics(loss: float) -> dict[str, object]:
    return {"loss": jnp.float32(loss), "grad_norm": jnp.float32(2 * loss), "learning_rate": jnp.float32(0.5)}


def test_a_step_is_read_when_the_next_is_dispatched_or_before_a_pause():
    seen, ends = Seen(), iter(range(100))
    follower = Follower(
        meter=Meter(tokens_per_step=10, clock=lambda: float(next(ends))),
        display=seen,  # type: ignore[arg-type]
        recorder=Recorder([seen]),  # type: ignore[list-item]
        summary=lambda found: {"x": float(found["x"][0])},
        utilization=lambda rate: rate / 100,
    )
    arrays = {**metrics(1.0), "x": [jnp.ones(())]}
    assert follower.dispatched(1, arrays) is None
    assert not seen.recorded
    before = follower.dispatched(2, {**metrics(np.inf), "x": [jnp.ones(())]})
    assert before is not None
    assert (before.step, before.grad_norm, before.tokens_per_second) == (1, 2.0, None)
    with follower.paused():
        assert [found.step for found in seen.shown] == [1, 2]
    assert follower.catch_up() is None
    first = {"loss": 1.0, "grad_norm": 2.0, "learning_rate": 0.5, "x": 1.0}
    rates = {"tokens_per_second": 10.0, "mfu": 0.1}
    assert seen.recorded == [(1, first), (2, {**first, "loss": np.inf, "grad_norm": np.inf, **rates})]
