"""Host time of the training loop beside the step itself: the next batch, reading, showing and writing metrics, the
check for what is not finite, the question whether to stop or save; not saving itself, which copies a state.

Before each part everything dispatched is waited for, so that a part counts what the host does and no device. The model
is small, since its size changes none of this. Medians, and the smallest times, which other work spoils least.

Run: ``python benchmarks/loop_overhead.py [steps]``
"""

from __future__ import annotations

import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
WARM_UP, STEP_SECONDS = 20, 0.1
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
from rich.console import Console

import piper_jax as piper
from piper_jax.checkpoint import Checkpointer
from piper_jax.config import load_config
from piper_jax.data import open_data
from piper_jax.optimizers import OBSERVED
from piper_jax.recording import Recorder, RunFolder
from piper_jax.train.finiteness import FiniteCheck
from piper_jax.train.following import Follower
from piper_jax.train.injection import Faults
from piper_jax.train.job import Job
from piper_jax.train.metrics import Meter
from piper_jax.train.progress import progress_display
from piper_jax.train.saving import Saver
from piper_jax.train.stopping import StopSignal


class Parts:
    """Seconds of each part, by name."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {}

    def time(self, name: str, pending: Any, call: Callable[..., Any], *arguments: Any) -> Any:
        jax.block_until_ready(pending)
        begin = time.perf_counter()
        result = call(*arguments)
        self.seconds.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    def print(self) -> None:
        total = 0.0
        for name, seconds in self.seconds.items():
            counted = seconds[WARM_UP:]
            total += statistics.median(counted)
            middle, least = statistics.median(counted) * 1e6, min(counted) * 1e6
            print(f"{name:12} {middle:7.0f} us, at least {least:.0f} us")
        print(f"{'all':12} {total * 1e6:7.0f} us: {total / STEP_SECONDS:.2%} of a step of {STEP_SECONDS * 1e3:.0f} ms")


def main() -> None:
    config, parts = load_config(ROOT / "configs" / "gpt_tiny.yaml", [f"train.steps={STEPS}"]), Parts()
    job, sizes = Job.of(config), config.train
    plan = job.plan()
    train = piper.compile(plan, devices=job.device_map(plan))
    state = train.init(job.parameters(), sizes.seed)
    batches = open_data(config).training()
    console = Console(file=io.StringIO(), force_terminal=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Recorder.open(config, RunFolder(Path(folder))) as recorder,
        progress_display(console, num_steps=STEPS, log_every=sizes.log_every) as display,
    ):
        meter = Meter(tokens_per_step=sizes.batch_size * sizes.sequence_length)
        follower = Follower(meter=meter, display=display, recorder=recorder, utilization=lambda rate: rate / 1e9)
        finite = FiniteCheck(sizes, train=train, display=display, recorder=recorder)
        checkpoints = Checkpointer(path=Path(folder) / "checkpoints")
        saver = Saver(
            config, checkpoints, train=train, display=display, recorder=recorder, faults=Faults(()), saved=0
        )  # fmt: skip
        stop = StopSignal()

        def asked(step: int, batch: Any, found: Any, state: Any) -> None:
            """All that the loop asks in a step in which nothing happens."""
            stop.check(step)
            finite.dispatched(step, batch)
            finite.look(found, state)
            saver.due(step)
            saver.look()

        for step in range(1, STEPS + 1):
            batch = parts.time("batch", state, next, batches)
            state, metrics = train.step(state, batch)
            observed = parts.time("norm, rate", (state, metrics), train.scalars, state, *OBSERVED)
            found = parts.time("metrics", observed, follower.dispatched, step, {**metrics, **observed})
            parts.time("stop, save", observed, asked, step, batch, found, state)
    parts.print()


if __name__ == "__main__":
    main()
