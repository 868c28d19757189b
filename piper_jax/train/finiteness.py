"""What a run does about a loss or a gradient that is NaN or infinite: it names the place, then ends or goes on."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import piper_jax as piper
from piper_jax.config import TrainSection
from piper_jax.data import Batch
from piper_jax.errors import NonFiniteError, counted
from piper_jax.recording import Recorder
from piper_jax.train.metrics import StepMetrics
from piper_jax.train.progress import Display

IN_FLIGHT = 2


class FiniteCheck:
    """Looks at the metrics of each step, which are read one step behind; the update itself left out such a gradient."""

    def __init__(self, section: TrainSection, *, train: piper.Train, display: Display, recorder: Recorder):
        self._section, self._train, self._display, self._recorder = section, train, display, recorder
        self._batches: deque[tuple[int, Batch]] = deque(maxlen=IN_FLIGHT)
        self._in_a_row = 0

    def dispatched(self, step: int, batch: Batch) -> None:
        """Keeps the batch until the metrics of its step were looked at."""
        self._batches.append((step, batch))

    def look(self, found: StepMetrics | None, state: Any) -> None:
        """Takes the metrics of a step that is done.

        Args:
          state: after that step or the one after it.

        Raises:
          NonFiniteError: by ``train.on_nonfinite``.
        """
        if found is None:
            return
        if math.isfinite(found.grad_norm) and math.isfinite(found.loss):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        changed = "was taken" if math.isfinite(found.grad_norm) else "changed nothing"
        what = f"step {found.step}: loss {found.loss:g}, gradient norm {found.grad_norm:g}; it {changed}"
        place = self._place(found.step, state)
        if self._section.on_nonfinite == "skip" and self._in_a_row <= self._section.max_skipped:
            self._display.note(f"skipped  {what}. First in {place}")
            self._recorder.say(found.step, {"skipped": f"{what}. First in {place}"})
            return
        after = f" (after {counted(self._in_a_row - 1, 'step')} that were skipped)" if self._in_a_row > 1 else ""
        raise NonFiniteError(
            f"{what}{after}.",
            detail=[f"first in {place}"],
            help="lower optimizer.learning_rate, or " + self._way_out(),
            step=found.step,
        )

    def _way_out(self) -> str:
        if self._section.on_nonfinite == "skip":
            return f"leave out more than train.max_skipped={self._section.max_skipped} in a row."
        return "leave the batch out: train.on_nonfinite=skip goes on without it."

    def _place(self, step: int, state: Any) -> str:
        batch = next((batch for number, batch in self._batches if number == step), None)
        found = None if batch is None else self._train.first_nonfinite(state, batch, step=step - 1)
        if found is None:
            return "no node when its batch was run again: it comes from the parameters as they were, or from sums"
        where = "" if found.node is None else f"stage {found.stage}, microbatch {found.microbatch}: "
        return f"{where}{found}"
