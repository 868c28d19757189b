"""The training loop: batches in, metrics and checkpoints out.

It knows the plan only as an object with ``step`` and ``evaluate``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from jax.errors import JaxRuntimeError

import piper_jax as piper
from piper_jax.checkpoint import Loaded
from piper_jax.data import Batch, Data
from piper_jax.data.batches import NO_TARGET, num_targets
from piper_jax.data.corpus import unigram_entropy
from piper_jax.optimizers import AVERAGE, OBSERVED
from piper_jax.processes.coordination import coordination
from piper_jax.processes.watchdog import Position, Watchdog
from piper_jax.recording import Recorder, RunFolder
from piper_jax.train.finiteness import FiniteCheck
from piper_jax.train.following import Follower
from piper_jax.train.injection import Faults
from piper_jax.train.job import Job
from piper_jax.train.metrics import Meter, Summary
from piper_jax.train.progress import Display
from piper_jax.train.resuming import checkpointer
from piper_jax.train.saving import Saver
from piper_jax.train.stopping import Stopped, StopSignal
from piper_jax.train.utilization import Utilization
from piper_jax.train.window import ProfileWindow


def run_job(
    job: Job, plan: piper.Plan, data: Data, display: Display, folder: RunFolder, recorder: Recorder, stop: StopSignal,
    saved: Loaded | None = None,
) -> Summary:  # fmt: skip
    """Trains until ``train.steps`` steps are done and evaluates on held-out text.

    Args:
      plan: of the job, placed and ordered.
      recorder: takes the metrics of every step.
      stop: ends the run between two steps.
      saved: what to go on from; None: the initial parameters.

    Raises:
      Stopped: by a signal, after the last step was saved.
      RuntimeFault: too few devices.  CheckpointError: a save failed.  NonFiniteError: by ``train.on_nonfinite``.
    """
    utilization = Utilization.of(job, plan)
    display.note(f"mfu    {utilization}")
    display.compiling()
    started, faults, limits = time.perf_counter(), Faults(job.config.faults), job.config.processes
    step, others = 0 if saved is None else saved.step, coordination()
    recorder.say(step, {"plan": str(job.strategy), "mfu": str(utilization)})
    stop.agree_with(others)
    watch = partial(Watchdog, coordination=others, lost_limit=limits.lost_limit)
    compiling = Position(step=step, what="compiling")
    with watch(position=lambda: compiling, step_limit=limits.compile_limit), stop.interruptible():
        faults.reach(step, "compile")
        train = piper.compile(plan, devices=job.device_map(plan), compile_limit=limits.compile_limit)
        state = train.init(job.parameters(), job.config.train.seed) if saved is None else saved.placed(train)
    loop = Loop(
        job, train, data, display, folder, recorder, stop, faults=faults, utilization=utilization, state=state,
        first=saved,
    )  # fmt: skip
    with watch(position=loop.position, step_limit=limits.step_limit) as dog, dog.naming_the_lost(JaxRuntimeError):
        return loop.run(started)


class Loop:
    """One run in its parts: data, steps, evaluation, checkpoints.

    Attributes:
      state, data_state: after ``step`` steps; what a checkpoint holds.
    """

    def __init__(
        self, job: Job, train: piper.Train, data: Data, display: Display, folder: RunFolder, recorder: Recorder,
        stop: StopSignal, *, faults: Faults, utilization: Utilization, state: Any, first: Loaded | None,
    ):  # fmt: skip
        config = job.config
        self._job, self._train, self._config, self._stop, self._faults = job, train, config, stop, faults
        self._display, self._recorder, self._unit = display, recorder, data.tokenizer.unit
        self._batches, self._held_out = data.training(train.rows()), data.held_out_batches()
        self.state, self.step, self._doing = state, 0, "data"
        if first is not None:
            self.step = first.step
            self._batches.restore(first.manifest.data)
        self.begun_at, self._making, self.data_state = self.step, self.step, self._batches.state()
        self._meter = Meter(tokens_per_step=config.train.batch_size * config.train.sequence_length)
        self._follower = Follower(
            meter=self._meter, display=display, recorder=recorder, summary=job.model.summary, utilization=utilization
        )
        self._finite = FiniteCheck(config.train, train=train, display=display, recorder=recorder)
        self._window = ProfileWindow(config.profile, train=train, folder=folder, recorder=recorder, display=display)
        self._saver = Saver(
            config, checkpointer(config, folder), train=train, display=display, recorder=recorder, faults=faults,
            saved=self.step,
        )  # fmt: skip

    def position(self) -> Position:
        """Where the run is, for the watchdog: the node that is being dispatched, or what else it does."""
        at = self._train.position
        return Position(step=self._making, what=self._doing if at is None else at)

    def run(self, started: float) -> Summary:
        """All steps that are left.

        Args:
          started: when compiling began.
        """
        try:
            try:
                while self.step < self._config.train.steps:
                    self._stop.check(self.step)
                    self._make_step()
                    self._after_step()
            finally:
                self._window.close()
            self._catch_up()
            seconds = time.perf_counter() - self._meter.first_ended
            held_out_loss = self._evaluate()
        except Stopped:
            self._catch_up()
            self._saver.finish(self.step, self.state, self.data_state)
            raise
        self._saver.finish(self.step, self.state, self.data_state)
        self._recorder.record(self.step, {"held_out_loss": held_out_loss})
        for fault in self._faults.missed():
            self._display.note(f"no fault  {fault}: the run did not come there")
        num_steps = self.step - self.begun_at
        num_tokens = (num_steps - 1) * self._meter.tokens_per_step
        return Summary(
            num_steps=num_steps,
            held_out_loss=held_out_loss,
            unit=self._unit,
            unigram_entropy=unigram_entropy(_predicted(self._held_out)),
            compile_seconds=self._meter.first_ended - started,
            train_seconds=seconds,
            tokens_per_second=num_tokens / seconds if num_tokens else None,
        )

    # -- parts of a step --------------------------------------------------------------------------------
    def _make_step(self) -> None:
        step, self._doing = self.step + 1, "data"
        self._making = step
        with self._stop.interruptible():
            self._faults.reach(step, "data")
            batch = self._faults.batch(step, next(self._batches))
        if self._window.opens(step):
            self._catch_up()
            with self._follower.paused():
                self._window.open(step, self.state, batch)
        self._doing = "waiting for the step before"
        self.state, metrics = self._train.step(self.state, batch)
        self.step, self.data_state = step, self._batches.state()
        self._doing = f"dispatched; reading what step {step - 1} gave"
        self._finite.dispatched(step, batch)
        self._faults.reach(step, "step")
        found = self._follower.dispatched(step, {**metrics, **self._train.scalars(self.state, *OBSERVED)})
        self._finite.look(found, self.state)
        self._window.after(step, self.state)

    def _after_step(self) -> None:
        every, step = self._config.evaluation.every, self.step
        if self._saver.due(step):
            self._catch_up()
            with self._follower.paused():
                self._doing = "saving"
                self._saver.begin(step, self.state, self.data_state)
                self._faults.reach(step, "save")
        self._saver.look()
        if every and step % every == 0 and step < self._config.train.steps:
            self._catch_up()
            with self._follower.paused():
                loss = self._evaluate()
            self._display.evaluation(step, loss)
            self._recorder.record(step, {"held_out_loss": loss})

    def _catch_up(self) -> None:
        """Waits for the last step that was dispatched, and looks at it."""
        self._finite.look(self._follower.catch_up(), self.state)

    def _evaluate(self) -> float:
        """Mean loss over the targets of the held-out batches, in nats."""
        train, use_ema, self._doing = self._train, self._config.evaluation.use_ema, "evaluation"
        with self._stop.interruptible():
            self._faults.reach(self.step, "evaluation")
            state = train.with_params_of(self.state, AVERAGE) if use_ema else self.state
            batches = [self._faults.batch(0, batch) for batch in self._held_out]
            losses = [train.evaluate(state, batch, self._job.model.evaluation_loss_fn)["loss"] for batch in batches]
            weights = [num_targets(batch) for batch in self._held_out]
            return float(np.average([float(loss) for loss in losses], weights=weights))


def _predicted(batches: Sequence[Batch]) -> Any:
    targets = np.concatenate([batch["targets"].ravel() for batch in batches])
    return targets[targets != NO_TARGET]
