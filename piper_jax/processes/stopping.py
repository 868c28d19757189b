"""All processes stop after the same step, whichever of them was asked to."""

from __future__ import annotations

from dataclasses import dataclass

from piper_jax.processes.coordination import Coordination

AHEAD = 2
"""No process begins a step before the results of the step this many before it have come, which all processes give."""


@dataclass(slots=True)
class StopAgreement:
    """Process 0 learns that some process was asked to stop, and says after which step all do.

    It names a step that no process can have passed: see ``AHEAD``.
    """

    coordination: Coordination | None
    _asked: bool = False
    _after: int | None = None

    def is_over(self, done: int, asked: bool) -> bool:
        """Whether to stop now.

        Args:
          done: steps that this process has begun or done; call it before each step.
          asked: whether this process was asked to stop.
        """
        if self.coordination is None:
            return asked
        if asked and not self._asked:
            self._asked = True
            self.coordination.tell("stop asked", str(done))
        if self._after is None:
            self._after = self._agreed(done)
        return self._after is not None and done >= self._after

    def _agreed(self, done: int) -> int | None:
        coordination = self.coordination
        assert coordination is not None
        if coordination.process == 0 and coordination.told("stop asked"):
            coordination.tell("stop after", str(done + AHEAD))
            return done + AHEAD
        if coordination.process != 0 and (said := coordination.told("stop after")):
            return int(said[0])
        return None
