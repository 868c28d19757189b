"""What ``piper doctor`` finds out about this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from piper_jax.errors import ConfigError
from piper_jax.processes.requested import requested
from piper_jax.versions import PACKAGES, PLUGINS, installed_versions, version_faults

WIDTH = 11
LOW_BYTES = 2 * 10**9
OPTIONAL = {
    "libtpu": "compiling for TPU without one",
    "jax_cuda12_plugin": "NVIDIA GPUs, and compiling for them without one",
    "matplotlib": "pictures (.svg .png .pdf): pip install 'piper-jax[draw]'",
    "wandb": "logging.wandb: pip install 'piper-jax[wandb]'",
    "tensorboard": "looking at the curves of a run: pip install tensorboard",
}
CLUSTERS: Mapping[str, tuple[str, ...]] = {
    "jax.distributed": ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    "Slurm": ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST"),
    "Kubernetes": ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "JOBSET_NAME"),
    "TPU": ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_SLICE_ID"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}
ACCELERATORS = {"/dev/nvidia0": "pip install 'jax[cuda12]'", "/dev/accel0": "pip install 'jax[tpu]'"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line or two.

    Attributes:
      help: what would make it right, on a line of its own.
      is_broken: nothing runs like this.
    """

    name: str
    text: str
    help: str = ""
    is_broken: bool = False

    def __str__(self) -> str:
        line = f"{self.name:{WIDTH}} {'BROKEN: ' if self.is_broken else ''}{self.text}"
        return f"{line}\n{'':{WIDTH}} help: {self.help}" if self.help else line


def diagnose(folder: Path) -> Iterator[Finding]:
    """Versions, what is missing, devices, cluster and disk, as they are found.

    Args:
      folder: of a run, or where runs are.
    """
    yield Finding(name="python", text=sys.version.split()[0])
    versions = tuple(_versions())
    yield from versions
    yield from _missing()
    if not any(finding.is_broken for finding in versions):
        yield from _devices()
    yield from _cluster(os.environ)
    yield _disk(folder)


def _versions() -> Iterator[Finding]:
    installed = installed_versions()
    for name in (*PACKAGES, *PLUGINS):
        if name in installed:
            yield Finding(name=name, text=installed[name])
    for fault in version_faults(installed):
        yield Finding(name="versions", text=fault.what, help=fault.help, is_broken=fault.is_broken)


def _missing() -> Iterator[Finding]:
    for name, use in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield Finding(name=name, text=f"not installed; needed for {use}")


def _devices() -> Iterator[Finding]:
    import jax

    from piper_jax._jax_compat import cpu_collectives
    from piper_jax.topology import topology_of

    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # which one depends on what the platform lacks
        platforms = os.environ.get("JAX_PLATFORMS")
        text = (str(error) or f"none of JAX_PLATFORMS={platforms}").splitlines()[0]
        fix = "unset JAX_PLATFORMS, or install what it names." if platforms else "see docs.jax.dev/installation."
        yield Finding(name="devices", text=text, help=fix, is_broken=True)
        return
    kinds = sorted({f"{d.platform} {d.device_kind}" for d in devices})
    where = f"process {jax.process_index()} of {jax.process_count()}"
    yield Finding(name="devices", text=f"{len(devices)} ({', '.join(kinds)}), {where}")
    topology = topology_of(devices)
    if not topology.is_flat:
        yield Finding(name="topology", text=str(topology))
    if devices[0].platform == "cpu":
        yield from _unused()
    if devices[0].platform == "cpu" and len(devices) == 1:
        yield Finding(
            name="", text="XLA_FLAGS=--xla_force_host_platform_device_count=8 makes one CPU look like eight devices"
        )
    found = cpu_collectives()
    gloo = "gloo" in found
    yield Finding(
        name="collectives",
        text=f"between CPU processes: {', '.join(found) or 'none'}",
        help="" if gloo else "this jaxlib has no gloo; several CPU processes need it.",
        is_broken=not gloo,
    )


def _unused() -> Iterator[Finding]:
    """Accelerators that the system has and JAX does not see."""
    for device, command in ACCELERATORS.items():
        if Path(device).exists() and os.environ.get("JAX_PLATFORMS", "") != "cpu":
            yield Finding(name="", text=f"{device} is there, but JAX does not use it", help=command)


def _cluster(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The variables by which processes find each other, and what they come to."""
    for cluster, names in CLUSTERS.items():
        known = [f"{name}={environment[name]}" for name in names if environment.get(name)]
        if known:
            yield Finding(name="cluster", text=f"{cluster}: {' '.join(known)}")
    try:
        asked = requested(environment)
    except ConfigError as error:
        yield Finding(name="processes", text=error.what, help=error.help, is_broken=True)
        return
    number = "one of several" if asked is None or asked.number is None else f"process {asked.number} of {asked.count}"
    yield Finding(name="processes", text="one" if asked is None else f"{number}, by {asked.cluster}")


def _disk(folder: Path) -> Finding:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if not (there.is_dir() and os.access(there, os.W_OK)):
        return Finding(name="folder", text=f"{there} cannot be written to", help="folder=...", is_broken=True)
    low = "" if free > LOW_BYTES else "room for few checkpoints; name a folder elsewhere: folder=..."
    return Finding(name="folder", text=f"{folder}: {free / 1e9:,.1f} GB free", help=low)
