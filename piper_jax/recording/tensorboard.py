"""Metrics as TensorBoard event files."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter

from piper_jax.recording.base import Facts

FLUSH_SECONDS = 5
MAX_WAITING = 10_000


class TensorBoard:
    """Curves by step; what earlier files have of steps after ``after`` is no longer shown. Numbers that are not finite
    are left out."""

    def __init__(self, folder: Path, *, after: int):
        self._writer = SummaryWriter(
            str(folder),
            purge_step=after + 1 if folder.exists() else None,
            max_queue=MAX_WAITING,
            flush_secs=FLUSH_SECONDS,
            filename_suffix=f".{time.time_ns()}",  # two files of one second would be one
        )

    def record(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def say(self, step: int, facts: Facts) -> None:
        rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
        self._writer.add_text("run", f"| what | value |\n|---|---|\n{rows}", step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
