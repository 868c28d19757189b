"""What is known of a run while it goes on. Imports no JAX."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

WINDOW_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step.

    Attributes:
      step: steps done, from 1.
      loss: of this step's batch, in nats.
      tokens_per_second: over the last steps; None until two steps after compiling are done.
      grad_norm: of the whole gradient before clipping; not finite where the step changed nothing.
      learning_rate: of the update.
      mfu: model FLOPs utilization, in [0, 1]; None where the peak of the devices is not known.
      peak_bytes: the most that a device has held so far; None where the platform does not count.
      named: what the model's summary says of the step's other metrics.
    """

    step: int
    loss: float
    tokens_per_second: float | None
    grad_norm: float = math.nan
    learning_rate: float = math.nan
    mfu: float | None = None
    peak_bytes: int | None = None
    named: Mapping[str, float] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        """All that is known, by name."""
        names = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "peak_bytes")
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**known, **self.named}

    @property
    def values(self) -> str:
        """The loss and the named values, such as ``loss 2.773  balance 1.020``."""
        return "  ".join(f"{name} {value:.3f}" for name, value in {"loss": self.loss, **self.named}.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A finished run.

    Attributes:
      held_out_loss: mean over the held-out batches, in nats per token.
      unigram_entropy: of the tokens that were predicted there, in nats.
      compile_seconds: of the first step.
      train_seconds: of the others.
      tokens_per_second: without the first step; None for a run of one step.
      unit: what a token is, in words.
    """

    num_steps: int
    held_out_loss: float
    unigram_entropy: float
    compile_seconds: float
    train_seconds: float
    tokens_per_second: float | None
    unit: str = "byte"

    def __str__(self) -> str:
        below = self.unigram_entropy - self.held_out_loss
        verdict = f"{abs(below):.3f} nats {'below' if below >= 0 else 'ABOVE'} it"
        rate = "" if self.tokens_per_second is None else f", {self.tokens_per_second:,.0f} tokens/s"
        others = f"{self.train_seconds:.1f} s for the other {self.num_steps - 1}{rate}"
        return "\n".join(
            [
                f"unigram entropy  {self.unigram_entropy:.3f} nats per {self.unit} (held-out {self.unit}s)",
                f"held-out loss    {self.held_out_loss:.3f} nats per {self.unit}, {verdict}",
                f"time             {self.compile_seconds:.1f} s first step with compiling, {others}",
            ]
        )


@dataclass(slots=True, kw_only=True)
class Meter:
    """Counts tokens per second over a sliding window; the first step, which compiles, is left out."""

    tokens_per_step: int
    clock: Callable[[], float] = time.perf_counter
    first_ended: float = 0.0
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS + 1))

    def step_ended(self) -> float | None:
        """Call after every step; returns tokens per second over at most the last 20."""
        now = self.clock()
        self.first_ended = self.first_ended or now
        self._ends.append(now)
        steps, seconds = len(self._ends) - 1, self._ends[-1] - self._ends[0]
        return steps * self.tokens_per_step / seconds if steps and seconds > 0 else None

    def restarted(self) -> None:
        """Call after a pause: what came before it no longer counts."""
        self._ends.clear()
        self._ends.append(self.clock())
