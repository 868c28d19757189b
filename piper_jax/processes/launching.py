"""``piper launch``: several processes of one command on this machine. Imports no JAX."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from piper_jax.processes.ending import EXIT_PROCESSES
from piper_jax.processes.requested import ADDRESS, COUNT, NUMBER

GRACE_SECONDS = 15.0
_NOISE = "peer ranks"
"""In lines that gloo prints from many threads."""


@dataclass(kw_only=True)
class Launcher:
    """Starts the processes, passes their lines and the signals on, and stops all when one fails.

    Attributes:
      command: of each process.
      count: of processes.
      port: of the coordinator; None: a free one.
      grace: seconds between asking the others to stop and killing them.
    """

    command: Sequence[str]
    count: int
    port: int | None = None
    grace: float = GRACE_SECONDS
    _children: list[subprocess.Popen[str]] = field(default_factory=list)
    _readers: list[threading.Thread] = field(default_factory=list)

    def run(self) -> int:
        """Runs until all have ended.

        Returns:
          0; the exit code of the first process that failed by itself; or 5 where a signal ended one.
        """
        address = f"127.0.0.1:{self.port or free_port()}"
        for number in range(self.count):
            self._start(number, {ADDRESS: address, COUNT: str(self.count), NUMBER: str(number)})
        before = {s: signal.signal(s, self._pass_on) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            return self._wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._stop()
            for reader in self._readers:
                reader.join()

    def _start(self, number: int, variables: dict[str, str]) -> None:
        child = subprocess.Popen(
            self.command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        self._children.append(child)
        for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
            assert source is not None
            reader = threading.Thread(target=self._copy, args=(number, source, target), daemon=True)
            reader.start()
            self._readers.append(reader)

    @staticmethod
    def _copy(number: int, source: IO[str], target: IO[str]) -> None:
        for line in source:
            if _NOISE not in line:
                target.write(f"[{number}] {line}")
                target.flush()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)

    def _wait(self) -> int:
        while True:
            codes = [child.poll() for child in self._children]
            failed = next((k for k, code in enumerate(codes) if code), None)
            if failed is not None:
                return self._failed(failed, codes[failed] or 0)
            if all(code == 0 for code in codes):
                return 0
            time.sleep(0.05)

    def _failed(self, process: int, code: int) -> int:
        others = sum(child.poll() is None for child in self._children)
        rest = f"; the other {others} are stopped" if others else ""
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        print(f"piper launch: process {process} {how}{rest}.", file=sys.stderr, flush=True)
        return EXIT_PROCESSES if code < 0 else code

    def _stop(self) -> None:
        """Asks the processes that still run to stop, twice: at once; then kills them."""
        running = [child for child in self._children if child.poll() is None]
        for number in (signal.SIGTERM, signal.SIGTERM):
            for child in running:
                if child.poll() is None:
                    child.send_signal(number)
            time.sleep(0.2)
        deadline = time.monotonic() + self.grace
        for child in running:
            try:
                child.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
