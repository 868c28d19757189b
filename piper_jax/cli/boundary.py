"""Where errors become messages and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable

from piper_jax.errors import CheckpointError, ConfigError, NonFiniteError, PiperError, ProcessFault
from piper_jax.processes.ending import EXIT_PROCESSES

EXIT_FAULT = 1
EXIT_CONFIG = 2
EXIT_CHECKPOINT = 3
EXIT_NONFINITE = 4
EXIT_INTERRUPTED = 130


def exit_code(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code.

    A :class:`PiperError` prints its message alone: 2 for a ConfigError, 3 for a CheckpointError, 4 for a
    NonFiniteError, 5 for a ProcessFault, 1 for any other. Ctrl-C is 130. Whatever else is raised is a fault of piper
    and keeps its traceback.
    """
    try:
        return command()
    except ConfigError as error:
        return _said(error, EXIT_CONFIG)
    except CheckpointError as error:
        return _said(error, EXIT_CHECKPOINT)
    except NonFiniteError as error:
        return _said(error, EXIT_NONFINITE)
    except ProcessFault as error:
        return _said(error, EXIT_PROCESSES)
    except PiperError as error:
        return _said(error, EXIT_FAULT)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _said(error: PiperError, code: int) -> int:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return code
