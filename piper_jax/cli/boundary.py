"""Where errors become messages and exit codes."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping

from piper_jax.errors import CheckpointError, ConfigError, NonFiniteError, PiperError, ProcessFault
from piper_jax.processes.coordination import coordination
from piper_jax.processes.ending import EXIT_PROCESSES, leave

EXIT_FAULT = 1
EXIT_CONFIG = 2
EXIT_CHECKPOINT = 3
EXIT_NONFINITE = 4
EXIT_INTERRUPTED = 130
EXIT_CODES: Mapping[type[PiperError], int] = {
    ConfigError: EXIT_CONFIG,
    CheckpointError: EXIT_CHECKPOINT,
    NonFiniteError: EXIT_NONFINITE,
    ProcessFault: EXIT_PROCESSES,
}


def exit_code(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code.

    A :class:`PiperError` prints its message alone: 2 for a ConfigError, 3 for a CheckpointError, 4 for a
    NonFiniteError, 5 for a ProcessFault, 1 for any other. Ctrl-C is 130. Whatever else is raised is a fault of piper
    and keeps its traceback.
    """
    try:
        return leave(command())
    except PiperError as error:
        return leave(_said(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return leave(EXIT_INTERRUPTED)
    except Exception:
        if coordination() is not None:
            traceback.print_exc()
            leave(EXIT_FAULT)
        raise


def _said(error: PiperError) -> int:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), EXIT_FAULT)
