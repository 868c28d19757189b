"""The training loop: batches in, metrics out. It knows the plan only as an object with ``step`` and ``evaluate``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import piper_jax as piper
from piper_jax.data import Batch, Data
from piper_jax.data.batches import NO_TARGET, num_targets
from piper_jax.data.corpus import unigram_entropy
from piper_jax.optimizers import AVERAGE, OBSERVED
from piper_jax.recording import Recorder, RunFolder
from piper_jax.train.following import Follower
from piper_jax.train.job import Job
from piper_jax.train.metrics import Meter, Summary
from piper_jax.train.progress import Display
from piper_jax.train.utilization import Utilization
from piper_jax.train.window import ProfileWindow


def run_job(job: Job, plan: piper.Plan, data: Data, display: Display, folder: RunFolder, recorder: Recorder) -> Summary:
    """Trains for ``train.steps`` steps and evaluates on held-out text.

    Args:
      plan: of the job, placed and ordered.
      recorder: takes the metrics of every step.

    Raises:
      RuntimeFault: too few devices.
    """
    sizes, evaluation = job.config.train, job.config.evaluation
    devices, utilization = job.device_map(plan), Utilization.of(job, plan)
    display.note(f"mfu    {utilization}")
    recorder.say(0, {"plan": str(job.strategy), "mfu": str(utilization)})
    display.compiling()
    started = time.perf_counter()
    train = piper.compile(plan, devices=devices)
    state = train.init(job.parameters(), sizes.seed)
    batches, held_out = data.training(), data.held_out_batches()
    weights = [num_targets(batch) for batch in held_out]

    def evaluate(state: Any) -> float:
        state = train.with_params_of(state, AVERAGE) if evaluation.use_ema else state
        losses = [train.evaluate(state, batch, job.model.evaluation_loss_fn)["loss"] for batch in held_out]
        return float(np.average([float(loss) for loss in losses], weights=weights))

    meter = Meter(tokens_per_step=sizes.batch_size * sizes.sequence_length)
    follower = Follower(
        meter=meter, display=display, recorder=recorder, summary=job.model.summary, utilization=utilization
    )
    window = ProfileWindow(job.config.profile, train=train, folder=folder, recorder=recorder, display=display)
    try:
        for step in range(1, sizes.steps + 1):
            batch = next(batches)
            if window.opens(step):
                with follower.paused():
                    window.open(step, state, batch)
            state, metrics = train.step(state, batch)
            follower.dispatched(step, {**metrics, **train.scalars(state, *OBSERVED)})
            window.after(step, state)
            if evaluation.every and step % evaluation.every == 0 and step < sizes.steps:
                with follower.paused():
                    loss = evaluate(state)
                display.evaluation(step, loss)
                recorder.record(step, {"held_out_loss": loss})
        follower.catch_up()
    finally:
        window.close()
    seconds = time.perf_counter() - meter.first_ended
    num_tokens = (sizes.steps - 1) * sizes.batch_size * sizes.sequence_length
    held_out_loss = evaluate(state)
    recorder.record(sizes.steps, {"held_out_loss": held_out_loss})
    return Summary(
        num_steps=sizes.steps,
        held_out_loss=held_out_loss,
        unit=data.tokenizer.unit,
        unigram_entropy=unigram_entropy(_predicted(held_out)),
        compile_seconds=meter.first_ended - started,
        train_seconds=seconds,
        tokens_per_second=num_tokens / seconds if num_tokens else None,
    )


def _predicted(batches: Sequence[Batch]) -> Any:
    targets = np.concatenate([batch["targets"].ravel() for batch in batches])
    return targets[targets != NO_TARGET]
