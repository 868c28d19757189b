"""Metrics as one JSON object per line."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piper_jax.recording.base import Facts


class JsonLines:
    """Appends ``{"step": 3, "loss": 2.1, ..., "time": 1.7e9}`` to a file; each line is in the file when it is recorded.

    A number that is not finite is written as null. Lines of steps after ``after``, which a run that did not get to save
    them left behind, are cut off first, and so is a line that was not written to its end.
    """

    def __init__(self, path: Path, *, after: int):
        if path.exists():
            os.truncate(path, _bytes_until(path, after))
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._write({"step": step, **finite, "time": round(time.time(), 3)})

    def say(self, step: int, facts: Facts) -> None:
        self._write({"step": step, "facts": dict(facts), "time": round(time.time(), 3)})

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False) + "\n")


def _bytes_until(path: Path, step: int) -> int:
    """How many bytes the lines up to a step take; steps only rise."""
    size = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or _step_of(line) > step:
                break
            size += len(line)
    return size


def _step_of(line: bytes) -> float:
    """Of a line that is damaged, one after all others."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
