"""How a process ends: in order, or at once. One that waits in a collective cannot be woken; ``os._exit`` ends it."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

from piper_jax.errors import PiperError
from piper_jax.processes.coordination import coordination

EXIT_PROCESSES = 5
LAST_SECONDS = 1.0


def leave(code: int) -> int:
    """The exit code of this process. One of several that has failed leaves at once: JAX would wait for the others,
    which wait for it. Process 0 leaves a little later, so that others that fail as well can say why themselves."""
    several = coordination()
    if code and several is not None:
        sys.stderr.flush()
        time.sleep(LAST_SECONDS if several.process == 0 else 0.0)
        _exit(code)
    return code


def end_in_order(ended: SystemExit) -> NoReturn:
    """The end of a script whose work is done and in files.

    Once JAX has run it is not left to Python's finalization: a thread of JAX, TensorStore or gRPC that comes back for
    the interpreter then aborts the process, seldom, with a code that says nothing.
    """
    if "jax" not in sys.modules:
        raise ended
    code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    several = coordination()
    if several is not None and not code:
        several.close()
    _exit(code)


def end_at_once(fault: PiperError) -> NoReturn:
    """Prints the fault, once for this process, and exits with 5."""
    print(f"{type(fault).__name__}: {fault}", file=sys.stderr)
    _exit(EXIT_PROCESSES)


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
