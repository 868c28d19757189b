"""Where metrics go: one interface, an implementation each in its own file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Facts = Mapping[str, float | str]


class Sink(Protocol):
    """Takes numbers by step, in order."""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step, by names such as ``loss`` and ``held_out_loss``."""

    def say(self, step: int, facts: Facts) -> None:
        """What holds from this step on, said once: a formula, a number of parameters."""

    def flush(self) -> None:
        """Everything so far is in files afterwards."""

    def close(self) -> None:
        """Nothing comes after."""
