"""SIGTERM and SIGINT: the first one ends a run in order, after a checkpoint; the second one ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from piper_jax.processes.coordination import Coordination
from piper_jax.processes.stopping import StopAgreement

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """Raised by a signal where nothing is half done; nothing but the loop may catch it."""


class StopSignal:
    """Catches the signals between ``with`` and its end; only in the main thread.

    A thread of its own hears every signal, also while the main thread compiles and runs no Python. Of several processes
    none may leave the others in the middle of anything: there a signal is heeded between two steps, the same in all.

    Attributes:
      requested: the signal that came, if one did.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._agreement = StopAgreement(None)
        self._interruptible = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignal:
        reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._listener = threading.Thread(target=_listen, args=(reads,), daemon=True, name="signals")
        self._listener.start()
        self._before = {number: signal.signal(number, self._caught) for number in SIGNALS}
        self._descriptor = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._writes)
        self._listener.join()

    def agree_with(self, others: Coordination | None) -> None:
        """From now on this is one of several processes."""
        self._agreement = StopAgreement(others)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around what may be left at any moment: a signal, also an earlier one, raises :class:`Stopped` in it."""
        self._interruptible = self._agreement.coordination is None
        try:
            if self._interruptible and self.requested is not None:
                raise Stopped
            yield
        finally:
            self._interruptible = False

    def check(self, done: int) -> None:
        """Raises :class:`Stopped` if a signal came, to whichever process.

        Args:
          done: steps begun so far; of the last of them but one, the results have been read.
        """
        if self._agreement.is_over(done, self.requested is not None):
            raise Stopped

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.requested = self.requested or signal.Signals(number)
        if self._interruptible:
            self._interruptible = False
            raise Stopped


def _listen(reads: int) -> None:
    """Hears one byte a signal until the other end is closed; ends the process at the second one."""
    heard = 0
    while number := os.read(reads, 1):
        if number[0] not in SIGNALS:
            continue
        heard += 1
        name = signal.Signals(number[0]).name
        if heard > 1:
            os._exit(128 + number[0])
        os.write(2, f"{name}: stopping after this step; once more: at once\n".encode())
    os.close(reads)
