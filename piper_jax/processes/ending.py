"""A process that waits in a collective cannot be woken: what ends it, from another thread, is ``os._exit``."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from piper_jax.errors import PiperError

EXIT_PROCESSES = 5


def end_at_once(fault: PiperError) -> NoReturn:
    """Prints the fault, once for this process, and exits with 5."""
    print(f"{type(fault).__name__}: {fault}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_PROCESSES)
