"""Saves training states while training goes on, and makes states of any plan of the same model from what was saved."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp

from piper_jax.checkpoint.folder import StepFolder
from piper_jax.checkpoint.manifest import Manifest
from piper_jax.checkpoint.reading import SavedStep
from piper_jax.checkpoint.writing import step_contents, step_writer
from piper_jax.errors import CheckpointError, RuntimeFault
from piper_jax.runtime.host_state import HostState
from piper_jax.runtime.state import TrainState
from piper_jax.runtime.training import Train
from piper_jax.versions import installed_versions

PACKAGES = ("piper-jax", "jax", "flax", "optax", "orbax-checkpoint")


OnCorrupt = Literal["fail", "previous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint in host memory, of no plan yet.

    Attributes:
      passed_over: newer steps that are damaged.
    """

    host: HostState
    manifest: Manifest
    passed_over: tuple[CheckpointError, ...] = ()

    @property
    def step(self) -> int:
        return self.manifest.step

    def placed(self, train: Train) -> TrainState:
        """As a state of a plan.

        Raises:
          CheckpointError: it is of another model or optimizer.
        """
        try:
            return train.from_host(self.host)
        except RuntimeFault as error:
            what = error.what.removeprefix("from_host: ")
            raise CheckpointError(f"checkpoint of step {self.step}: {what}", help=error.help) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A checkpoint as the state of a plan.

    Attributes:
      step: steps done.  data, config: what ``save`` was given.
      passed_over: newer steps that are damaged.
    """

    state: TrainState
    step: int
    data: Any
    config: Any
    passed_over: tuple[CheckpointError, ...] = ()


@dataclass(kw_only=True)
class Checkpointer:
    """A folder of checkpoints in the model's own layout: any plan of the same model loads what any other saved.

    ```python
    checkpoints = piper.Checkpointer(path="runs/gpt/checkpoints")
    checkpoints.save(train, state)             # goes on in the background
    checkpoints.wait()                         # committed, or an error
    state = checkpoints.restore(other).state   # of another plan; bit for bit
    ```

    Attributes:
      path: made if it is not there.
      keep: the newest steps that are kept; None means all.
      keep_every: multiples of this many steps are kept besides.
    """

    path: str | Path
    keep: int | None = 3
    keep_every: int | None = None
    _pending: int | None = None
    _committed: threading.Event = field(default_factory=threading.Event)
    _writer: ocp.AsyncCheckpointer | None = None

    @property
    def folder(self) -> StepFolder:
        return StepFolder(path=Path(self.path).absolute(), keep=self.keep, keep_every=self.keep_every)

    def steps(self) -> list[int]:
        """Committed steps, in order."""
        return self.folder.steps()

    def save(self, train: Train, state: TrainState, *, data: Any = None, config: Any = None) -> int:
        """Copies the state to host memory, then writes it in the background, under the number of steps done.

        An earlier save that has not ended is waited for first. Where several processes run the plan, all of them save.

        Args:
          data: the state of the data pipeline.  config: of the run.  Both of what JSON has.

        Raises:
          CheckpointError: the earlier save failed, this one cannot begin, or the step is there.
        """
        self.wait()
        host = train.to_host(state, only=0)
        if jax.process_index():
            return host.step  # the first process writes for all
        if host.step in self.steps():
            raise CheckpointError(
                f"checkpoint {self.path}: step {host.step} is there already.",
                help=f"save into another folder, or remove {self.folder.of(host.step)} first.",
                step=host.step,
            )
        contents = step_contents(host, data, config, installed_versions(PACKAGES))
        if self._writer is None:
            self._writer = step_writer(self._committed.set)
        self._committed.clear()
        self._pending = host.step
        try:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self._writer.save(self.folder.of(host.step), args=contents)
        except Exception as error:
            raise self._failed(error) from error
        return host.step

    def committed(self) -> int | None:
        """The step that has been committed since this was last asked, if any; waits for nothing.

        Raises:
          CheckpointError: it could not be saved; those before it are as they were.
        """
        if self._pending is None or self._writer is None:
            return None
        try:
            self._writer.check_for_errors()
        except Exception as error:
            raise self._failed(error) from error
        if not self._committed.is_set():
            return None
        step, self._pending = self._pending, None
        self.folder.prune()
        return step

    def wait(self) -> int | None:
        """As ``committed``, once the save that goes on has ended."""
        if self._pending is not None and self._writer is not None:
            try:
                self._writer.wait_until_finished()
            except Exception as error:
                raise self._failed(error) from error
        return self.committed()

    def load(self, step: int | None = None, *, on_corrupt: OnCorrupt = "fail") -> Loaded:
        """The newest committed step, or a given one, in host memory; every leaf is held against its hash.

        Args:
          on_corrupt: ``"previous"`` goes back to the newest step that is whole, and tells which are not.

        Raises:
          CheckpointError: there is none, or it is damaged.
        """
        passed_over: list[CheckpointError] = []
        for found in self.folder.existing(step):
            try:
                saved = SavedStep.open(self.folder.of(found))
                return Loaded(host=saved.host_state(), manifest=saved.manifest, passed_over=tuple(passed_over))
            except CheckpointError as error:
                passed_over.append(error)
                if on_corrupt == "fail":
                    break
        raise passed_over[0]

    def restore(self, train: Train, step: int | None = None, *, on_corrupt: OnCorrupt = "fail") -> Restored:
        """What ``load`` gives, as a state of ``train``.

        Raises:
          CheckpointError: there is none, it is damaged, or it is of another model or optimizer.
        """
        found = self.load(step, on_corrupt=on_corrupt)
        return Restored(
            state=found.placed(train), step=found.step, data=found.manifest.data, config=found.manifest.config,
            passed_over=found.passed_over,
        )  # fmt: skip

    def _failed(self, error: Exception) -> CheckpointError:
        step, self._pending, self._writer = self._pending, None, None  # a writer that failed goes on failing
        assert step is not None
        self.folder.sweep()
        known = self.steps()
        return CheckpointError(
            f"checkpoint of step {step} could not be saved in {self.path}: {_reason(error)}.",
            help=(f"the last one is that of step {known[-1]}; " if known else "there is none before it; ")
            + "make room or give another folder, and run the same command again.",
            step=step,
        )


def _reason(error: BaseException) -> str:
    """The operating system's words, if they are among the causes."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code.group(1)))
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.split(" [")[0][:300]
