"""The training loop: batches in, metrics out. It knows the plan only as an object with ``step`` and ``evaluate``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import piper_jax as piper
from piper_jax.optimizers import AVERAGE
from piper_jax.train.batches import Batch, RandomWindows, held_out_batches
from piper_jax.train.corpus import Corpus, unigram_entropy
from piper_jax.train.job import Job
from piper_jax.train.metrics import Meter, StepMetrics, Summary
from piper_jax.train.progress import Display


def run_job(job: Job, plan: piper.Plan, corpus: Corpus, display: Display) -> Summary:
    """Trains for ``train.steps`` steps and evaluates on held-out text.

    Args:
      plan: of the job, placed and ordered.

    Raises:
      RuntimeFault: too few devices.
    """
    sizes, evaluation = job.config.train, job.config.evaluation
    shape = {"batch_size": sizes.batch_size, "sequence_length": sizes.sequence_length}
    devices = job.device_map(plan)
    display.compiling()
    started = time.perf_counter()
    train = piper.compile(plan, devices=devices)
    state = train.init(job.parameters(), sizes.seed)
    batches = RandomWindows(text=corpus.train, seed=sizes.seed, **shape)
    held_out = held_out_batches(corpus.held_out, num_batches=evaluation.num_batches, **shape)

    def evaluate(state: Any) -> float:
        state = train.with_params_of(state, AVERAGE) if evaluation.use_ema else state
        losses = [train.evaluate(state, batch, job.model.evaluation_loss_fn)["loss"] for batch in held_out]
        return float(np.mean([float(loss) for loss in losses]))

    meter, first_ended = Meter(tokens_per_step=sizes.batch_size * sizes.sequence_length), started
    for step in range(1, sizes.steps + 1):
        state, metrics = train.step(state, next(batches))
        loss = float(metrics["loss"])
        named = {} if job.model.summary is None else job.model.summary(metrics)
        display.step(StepMetrics(step=step, loss=loss, tokens_per_second=meter.step_ended(), named=named))
        if step == 1:
            first_ended = time.perf_counter()
        if evaluation.every and step % evaluation.every == 0 and step < sizes.steps:
            display.evaluation(step, evaluate(state))
    seconds = time.perf_counter() - first_ended
    num_tokens = (sizes.steps - 1) * sizes.batch_size * sizes.sequence_length
    measured = train.profile(state, next(batches), title="measured") if job.config.profile is not None else None
    return Summary(
        measured=measured,
        num_steps=sizes.steps,
        held_out_loss=evaluate(state),
        unigram_entropy=unigram_entropy(_predicted(held_out)),
        compile_seconds=first_ended - started,
        train_seconds=seconds,
        tokens_per_second=num_tokens / seconds if num_tokens else None,
    )


def _predicted(batches: Sequence[Batch]) -> Any:
    return np.concatenate([batch["targets"].ravel() for batch in batches]).astype(np.uint8)
