"""Shows a run: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from piper_jax.train.metrics import StepMetrics


class Display(Protocol):
    """Gets every step, every evaluation in between, and lines about what was written."""

    def compiling(self) -> None: ...

    def step(self, metrics: StepMetrics) -> None: ...

    def evaluation(self, step: int, loss: float) -> None: ...

    def note(self, line: str) -> None: ...


@contextmanager
def progress_display(console: Console, *, num_steps: int, log_every: int) -> Iterator[Display]:
    """The display that fits the console; a bar is cleaned up however the run ends."""
    if not console.is_terminal:
        yield _Lines(console, num_steps, log_every)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[values]}  {task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console) as bar:
        yield _Bar(bar, num_steps)


class _Bar:
    def __init__(self, bar: Progress, num_steps: int):
        self._bar = bar
        self._task = bar.add_task("training", total=num_steps, values="loss -", rate="")

    def compiling(self) -> None:
        self._bar.update(self._task, description="compiling")

    def step(self, metrics: StepMetrics) -> None:
        rate = "" if metrics.tokens_per_second is None else f"{metrics.tokens_per_second:,.0f} tokens/s"
        self._bar.update(self._task, description="training", completed=metrics.step, values=metrics.values, rate=rate)

    def evaluation(self, step: int, loss: float) -> None:
        self.note(f"step {step}: held-out loss {loss:.3f}")

    def note(self, line: str) -> None:
        self._bar.console.print(line, highlight=False, markup=False)


class _Lines:
    def __init__(self, console: Console, num_steps: int, log_every: int):
        self._console, self._num_steps, self._log_every = console, num_steps, log_every

    def compiling(self) -> None:
        self.note("compiling")

    def step(self, metrics: StepMetrics) -> None:
        if metrics.step == 1 or metrics.step % self._log_every == 0 or metrics.step == self._num_steps:
            rate = "" if metrics.tokens_per_second is None else f"  {metrics.tokens_per_second:,.0f} tokens/s"
            self.note(f"step {metrics.step}/{self._num_steps}  {metrics.values}{rate}")

    def evaluation(self, step: int, loss: float) -> None:
        self.note(f"step {step}/{self._num_steps}  held-out loss {loss:.3f}")

    def note(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
