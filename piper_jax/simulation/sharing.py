"""How many groups compute at full speed at once, from how long they take together."""

from __future__ import annotations

from collections.abc import Sequence


def shared_seconds(alone: Sequence[float], concurrency: float) -> float:
    """When the last of several tasks that start together ends, if ``concurrency`` of them run at full speed.

    Args:
      alone: how long each takes by itself.
      concurrency: as in the engine: n tasks run at the rate ``min(1, concurrency / n)``.
    """
    now, done = 0.0, 0.0
    for ended, duration in enumerate(sorted(alone)):
        now += (duration - done) * max(1.0, (len(alone) - ended) / concurrency)
        done = duration
    return now


def sharing_of(alone: Sequence[float], together: float, tolerance: float = 0.02) -> float | None:
    """The concurrency at which tasks that take ``alone`` seconds each take ``together`` seconds at once.

    Returns:
      None if they do not slow each other by more than ``tolerance``.
    """
    if together <= max(alone, default=0.0) * (1.0 + tolerance):
        return None
    low, high = 1e-3, float(len(alone))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if shared_seconds(alone, middle) > together else (low, middle)
    return high
