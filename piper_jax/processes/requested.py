"""Whether the environment asks for several processes. Imports no JAX."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from piper_jax.errors import ConfigError

ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""What ``piper launch`` sets, and what a job script sets where JAX does not find the cluster by itself."""

_CLUSTERS = {"Slurm": ("SLURM_NTASKS", "SLURM_PROCID"), "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """One of several processes.

    Attributes:
      cluster: what asks for it: the three variables, or a cluster that JAX knows.
      address: ``host:port`` of process 0; None: JAX finds it, and the two numbers, by itself.
      count, number: of processes, and of this one; None where only JAX knows them.
    """

    cluster: str
    address: str | None = None
    count: int | None = None
    number: int | None = None


def requested(environment: Mapping[str, str] = os.environ) -> Requested | None:
    """What the environment asks for; None: this process is alone.

    Raises:
      ConfigError: some of the three variables are set and others not, or one is no number.
    """
    given = [name for name in (ADDRESS, COUNT, NUMBER) if environment.get(name)]
    cluster = _cluster(environment)
    if len(given) == 3:
        if not environment[ADDRESS].rpartition(":")[2].isdigit():
            raise ConfigError(f"{ADDRESS}={environment[ADDRESS]!r} has no port.", help="such as host:1234.")
        count, number = (_number(environment, name) for name in (COUNT, NUMBER))
        if not number < count:
            raise ConfigError(f"{NUMBER}={number}: there are {COUNT}={count} processes.", help="count them from 0.")
        return Requested(cluster="variables", address=environment[ADDRESS], count=count, number=number)
    if {COUNT, NUMBER} & set(given) or (given and cluster is None):
        missing = [name for name in (ADDRESS, COUNT, NUMBER) if name not in given]
        raise ConfigError(f"{given[-1]} is set, but {' and '.join(missing)} not.", help="set all three, or none.")
    return cluster


def _cluster(environment: Mapping[str, str]) -> Requested | None:
    """What a cluster that JAX knows says."""
    for cluster, (count_name, number_name) in _CLUSTERS.items():
        if environment.get(count_name, "1") != "1":
            if not environment.get(number_name):
                raise ConfigError(
                    f"{count_name} is set, but {number_name} is not set: {cluster} did not start this process.",
                    help="start it with srun or mpirun; processes.join=never keeps it alone.",
                )
            count, number = (_number(environment, name) for name in (count_name, number_name))
            return Requested(cluster=cluster, count=count, number=number)
    if "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return Requested(cluster="TPU pod")
    if "JOB_COMPLETION_INDEX" in environment and "KUBERNETES_SERVICE_HOST" in environment:
        return Requested(cluster="Kubernetes")
    return None


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise ConfigError(f"{name}={text!r} is no number.", help="processes are counted from 0.")
    return int(text)
