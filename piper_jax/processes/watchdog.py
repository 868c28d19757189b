"""A thread that tells the others where this process is, and ends it when one of them is lost or all are stuck."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from piper_jax.errors import PiperError, ProcessFault
from piper_jax.processes.coordination import Coordination
from piper_jax.processes.ending import end_at_once

INTERVAL = 1.0
_TOPIC = "alive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a process is: at which step, doing what, such as ``F[PP=1,MB=0]``."""

    step: int
    what: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.what}"


@dataclass(slots=True)
class _Seen:
    """What was heard last of a process, and when each changed."""

    beat: int
    beat_at: float
    position: Position
    position_at: float


@dataclass(kw_only=True)
class Watchdog:
    """Watches all processes from one of them.

    Attributes:
      position: of this process.
      lost_limit: seconds without a sign of life.
      step_limit: seconds that a process may stay where it is.
      end: what is called with the fault; by default it prints it and exits with 5.
    """

    coordination: Coordination | None
    position: Callable[[], Position]
    lost_limit: float
    step_limit: float
    interval: float = INTERVAL
    end: Callable[[PiperError], None] = end_at_once
    clock: Callable[[], float] = time.monotonic
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _beat: int = 0
    _reached: float = 0.0
    _stopped: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watchdog:
        self._reached = self.clock()
        threading.Thread(target=self._watch, name="piper watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    @contextmanager
    def naming_the_lost(self, *errors: type[Exception]) -> Iterator[None]:
        """Around what other processes take part in: where it fails because one of them is lost, that one is named.

        Args:
          errors: what the failure is raised as.

        Raises:
          ProcessFault: none turned out to be lost within ``lost_limit``.
        """
        try:
            yield
        except errors as error:
            if self.coordination is None:
                raise
            first = (str(error).splitlines() or [""])[0]
            print(f"process {self.coordination.process}: a program failed: {first}", file=sys.stderr, flush=True)
            self._stopped.wait(self.lost_limit + 3 * self.interval)
            raise ProcessFault(
                f"process {self.coordination.process}: a program that other processes take part in failed.",
                detail=[first],
                help="look at the output of the others; start all again: the run goes on from its last checkpoint.",
            ) from None

    def _watch(self) -> None:
        while not self._stopped.wait(self.interval):
            fault = self.look()
            if fault is not None and not self._stopped.is_set():
                self.end(fault)
                return

    def look(self) -> ProcessFault | None:
        """Tells the others where this process is, and looks where they are; what is wrong, or None."""
        now, own = self.clock(), self.position()
        self._beat += 1
        if self.coordination is None:
            self._heard(0, self._beat, own, now)
            return self._stuck(now)
        try:
            self.coordination.tell(_TOPIC, json.dumps([self._beat, own.step, own.what]))
            told = self.coordination.told(_TOPIC)
            self._reached = now
        except Exception:
            return self._unreachable(now)
        for process, text in told.items():
            beat, step, what = json.loads(text)
            self._heard(process, beat, Position(step=step, what=what), now)
        return self._lost(now) or self._stuck(now)

    def _heard(self, process: int, beat: int, position: Position, now: float) -> None:
        before = self._seen.get(process)
        if before is None:
            self._seen[process] = _Seen(beat, now, position, now)
            return
        if beat != before.beat:
            before.beat, before.beat_at = beat, now
        if position != before.position:
            before.position, before.position_at = position, now

    def _lost(self, now: float) -> ProcessFault | None:
        lost = {p: s for p, s in self._seen.items() if now - s.beat_at > self.lost_limit}
        if not lost:
            return None
        return self._fault(f"{_named(lost)} lost: no sign of life for {self.lost_limit:g} s", now)

    def _stuck(self, now: float) -> ProcessFault | None:
        if not self._seen or any(now - s.position_at <= self.step_limit for s in self._seen.values()):
            return None
        return self._fault(f"no process has gone on for {self.step_limit:g} s", now)

    def _unreachable(self, now: float) -> ProcessFault | None:
        if now - self._reached <= self.lost_limit:
            return None
        return self._fault(f"process 0 is lost: its key-value store has not answered for {self.lost_limit:g} s", now)

    def _fault(self, what: str, now: float) -> ProcessFault:
        detail = [f"process {p}: {s.position} (for {now - s.position_at:.0f} s)" for p, s in sorted(self._seen.items())]
        return ProcessFault(
            f"{what}.", detail=detail, help="start all processes again: the run goes on from its last checkpoint."
        )


def _named(found: Mapping[int, object]) -> str:
    names = ", ".join(map(str, sorted(found)))
    return f"process {names} is" if len(found) == 1 else f"processes {names} are"
