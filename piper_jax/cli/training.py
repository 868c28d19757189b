"""The command that trains."""

from __future__ import annotations

from contextlib import nullcontext

from rich.console import Console

from piper_jax.cli.joining import joined
from piper_jax.cli.plans import grid, job_of, planned, report_of, say
from piper_jax.config import Config
from piper_jax.recording import Recorder, RunFolder
from piper_jax.train.stopping import Stopped, StopSignal
from piper_jax.versions import require_versions


def train(config: Config) -> int:
    """Trains, from the newest checkpoint of the run on: prints the plan, progress, held-out loss and unigram entropy.

    A signal ends it in order: it saves, and the same command goes on.
    """
    console, folder = joined(config), RunFolder.of(config).make()
    with nullcontext() if console.quiet else folder.locked(), StopSignal() as stop:
        try:
            return _train(console, config, folder, stop)
        except Stopped:
            name = stop.requested.name if stop.requested is not None else "by another process"
            say(console, f"stopped  {name}; the same command goes on")
            return 0


def _train(console: Console, config: Config, folder: RunFolder, stop: StopSignal) -> int:
    with stop.interruptible():
        for fault in require_versions():
            say(console, f"warning: {fault.what} {fault.help}")
        job = job_of(config)
        from piper_jax.data import open_data
        from piper_jax.train.loop import run_job
        from piper_jax.train.progress import progress_display
        from piper_jax.train.resuming import checkpointer, last_saved

        saved = last_saved(config, checkpointer(config, folder))
        step = 0 if saved is None else saved.step
        for error in saved.passed_over if saved is not None else ():
            say(console, f"passed over  {error.what}")
        if step >= config.train.steps:
            say(console, f"finished  {folder.path} has all {step} steps; folder=runs/mine begins another run")
            return 0
        data = open_data(config, folder.path)
        say(console, f"run    {folder.path}\ndata   {data}")
        plan = planned(console, job)
        simulated = report_of(plan, config)
        say(console, grid(simulated) + "\n")
        if (placed := job.device_map(plan)).crossings:
            say(console, f"{placed}\n")
        if saved is not None:
            say(console, f"resumed  from step {step}: {folder.checkpoints}")
        writes = not console.quiet
        if writes:
            folder.save(config)
    with (
        Recorder.open(config, folder, after=step) if writes else Recorder() as recorder,
        progress_display(console, num_steps=config.train.steps, log_every=config.train.log_every) as display,
    ):
        if saved is None:
            recorder.record(0, {"bubble_simulated": simulated.bubble, "peak_bytes_simulated": simulated.peak_bytes})
        summary = run_job(job, plan, data, display, folder, recorder, stop, saved)
    say(console, f"\n{summary}")
    if data.corpus.skipped.reasons:
        say(console, f"data             {data.corpus.skipped}")
    return 0
