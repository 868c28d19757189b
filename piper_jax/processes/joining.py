"""This process becomes one of several, through ``jax.distributed``."""

from __future__ import annotations

import jax

from piper_jax import _jax_compat
from piper_jax.errors import ProcessFault
from piper_jax.processes.coordination import Coordination, coordination
from piper_jax.processes.ending import end_at_once
from piper_jax.processes.requested import Requested, requested


def join_processes(start_limit: float = 300.0) -> Coordination | None:
    """Joins other processes where the environment asks for several; does nothing where this one is alone.

    To be called before JAX has devices. What asks is ``piper launch``, the variables JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID, or a cluster that JAX knows (Slurm, Open MPI, TPU pods, Kubernetes).

    Args:
      start_limit: seconds in which all processes must have come.

    Returns:
      This process among the others, with its number and their count; None where it is alone.

    Raises:
      ProcessFault: the others have not come.  ConfigError: some of the variables are missing.
    """
    asked = requested()
    if asked is not None:
        join(asked, start_limit)
    return coordination()


def join(asked: Requested, start_limit: float) -> None:
    """Connects to process 0; collectives between CPU devices go through gloo. Call it before JAX has devices.

    Args:
      start_limit: seconds in which all processes must have come.

    Raises:
      ProcessFault: they have not.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        count, number = (asked.count, asked.number) if asked.address else (None, None)
        _jax_compat.join_processes(asked.address, count, number, round(start_limit), _lost)
    except (RuntimeError, ValueError) as error:
        who = "this process" if asked.number is None else f"process {asked.number} of {asked.count}"
        raise ProcessFault(
            f"{who} could not join the others within {start_limit:g} s (asked for by {asked.cluster}).",
            detail=["the others did not come"] if "bad_cast" in str(error) else str(error).splitlines()[:4],
            help=f"start all processes, and let them reach {asked.address or 'process 0'}.",
        ) from None


def _lost() -> None:
    """JAX's coordination service, in process 0, is gone, or has found a process missing before the watchdog did."""
    fault = ProcessFault(
        "process 0 is lost, which all others are connected to; or it has found that another one is (see above).",
        help="start all processes again: the run goes on from its last checkpoint.",
    )
    end_at_once(fault)
