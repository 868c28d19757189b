"""A window of steps that is looked at closely."""

from __future__ import annotations

from typing import Any

import jax

import piper_jax as piper
from piper_jax.config import ProfileSection
from piper_jax.recording import Recorder, RunFolder
from piper_jax.simulation import MeasuredCosts, simulate
from piper_jax.train.progress import Display
from piper_jax.visualization import draw


class ProfileWindow:
    """Measures the first step of the window node by node, and traces all of its steps with JAX's profiler.

    The trace is for TensorBoard's profile plugin and for Perfetto. Of several processes the first traces, and none
    measures. Without a section it does nothing.
    """

    def __init__(
        self, section: ProfileSection | None, *, train: piper.Train, folder: RunFolder, recorder: Recorder,
        display: Display,
    ):  # fmt: skip
        self._steps = section.steps if section and jax.process_index() == 0 else None
        self._train, self._folder, self._recorder, self._display = train, folder, recorder, display
        self._tracing = False

    def opens(self, step: int) -> bool:
        """Whether :meth:`open` is to be called before this step is dispatched."""
        return self._steps is not None and not self._tracing and self._steps[0] <= step <= self._steps[1]

    def open(self, step: int, state: Any, batch: Any) -> None:
        """Measures the step with the state and the batch that it will take, and starts the trace."""
        if jax.process_count() == 1:
            self._measure(step, state, batch)
        jax.block_until_ready(state)
        jax.profiler.start_trace(str(self._folder.tensorboard))
        self._tracing = True

    def after(self, step: int, state: Any) -> None:
        """To be called after each step was dispatched, with the state that it gave."""
        if self._tracing and self._steps is not None and step >= self._steps[1]:
            jax.block_until_ready(state)
            self.close()
            self._display.note(f"traced steps {self._steps[0]} to {step}: {self._folder.tensorboard}/plugins/profile")
            self._steps = None

    def close(self) -> None:
        """Ends a trace that was not ended, such as one of a run that was stopped."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()

    def _measure(self, step: int, state: Any, batch: Any) -> None:
        measured = self._train.profile(state, batch, title=f"step {step}, measured")
        costs = MeasuredCosts.from_timeline(measured.timeline)
        planned = simulate(self._train.plan, costs=costs, title="planned, with measured costs")
        for name in ("piper-profile.html", "piper-profile.json"):
            self._display.note(f"wrote {draw(planned, self._folder.path / name, measured=measured)}")
        self._recorder.record(step, {"bubble_measured": measured.bubble})
