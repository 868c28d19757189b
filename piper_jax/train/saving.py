"""When a run saves, and what it does where a checkpoint cannot be saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

import piper_jax as piper
from piper_jax.checkpoint import Checkpointer
from piper_jax.config import Config
from piper_jax.errors import CheckpointError
from piper_jax.recording import Recorder
from piper_jax.train.injection import Faults
from piper_jax.train.progress import Display


class Saver:
    """Saves every so many steps and says so once a step is committed.

    Args:
      checkpoints: None where ``checkpoint.every`` is 0: nothing is saved then.
      saved: the step that the run began with, which is there.
    """

    def __init__(
        self, config: Config, checkpoints: Checkpointer | None, *, train: piper.Train, display: Display,
        recorder: Recorder, faults: Faults, saved: int,
    ):  # fmt: skip
        self._config, self._checkpoints, self._train = config, checkpoints, train
        self._display, self._recorder, self._faults = display, recorder, faults
        self._saved = self._begun = saved

    def due(self, step: int) -> bool:
        """Whether a step is one that is saved after it."""
        section = self._config.checkpoint
        return self._checkpoints is not None and (step % section.every == 0 or step == self._config.train.steps)

    def begin(self, step: int, state: Any, data: Any) -> None:
        """Copies the state and goes on writing in the background; a failed save before it is reported first."""
        if self._checkpoints is None or self._is_there(step):
            return
        self._recorder.flush()
        with self._policy():
            self._say(self._checkpoints.wait())
        if self._is_there(step):
            return
        self._begun = step
        with self._policy(), self._faults.around_save(step):
            self._checkpoints.save(self._train, state, data=data, config=self._config.model_dump(mode="json"))
            if self._faults.fills_disk(step):
                self._say(self._checkpoints.wait())

    def look(self) -> None:
        """To be called often: tells of a step that was committed or failed meanwhile."""
        if self._checkpoints is not None:
            with self._policy():
                self._say(self._checkpoints.committed())

    def finish(self, step: int, state: Any, data: Any) -> None:
        """Saves this step, if it is not saved, and waits until it is committed."""
        self.begin(step, state, data)
        if self._checkpoints is not None:
            with self._policy():
                self._say(self._checkpoints.wait())

    def _is_there(self, step: int) -> bool:
        """Whether nothing is left to do for a step. All of several processes must say the same, and only the first
        knows what was committed."""
        return step == (self._saved if jax.process_count() == 1 else self._begun)

    def _say(self, step: int | None) -> None:
        if step is not None and self._checkpoints is not None:
            self._saved = step
            self._display.note(f"saved  step {step}: {self._checkpoints.path}")

    @contextmanager
    def _policy(self) -> Iterator[None]:
        """``checkpoint.on_failure``: the run ends, or goes on with what was saved before."""
        try:
            yield
        except CheckpointError as error:
            if self._config.checkpoint.on_failure == "fail":
                raise
            self._display.note(f"NOT SAVED  {error}")
            self._recorder.say(0, {"not_saved": str(error)})
