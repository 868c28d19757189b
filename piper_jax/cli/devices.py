"""The devices section takes effect through the environment, before JAX is imported."""

from __future__ import annotations

import os
import sys

from piper_jax.config import DevicesSection
from piper_jax.errors import ConfigError

VIRTUAL = "--xla_force_host_platform_device_count"


def prepare_devices(section: DevicesSection, num_processes: int | None = 1) -> None:
    """Sets ``JAX_PLATFORMS`` and the number of virtual CPU devices; does nothing once JAX is imported.

    Args:
      num_processes: that share the virtual devices; None: only JAX knows.

    Raises:
      ConfigError: they cannot be shared equally.
    """
    if "jax" in sys.modules:
        return
    if section.platform is not None:
        os.environ["JAX_PLATFORMS"] = section.platform
    if section.num_virtual is not None:
        if num_processes is None or section.num_virtual % num_processes:
            sharers = "unknown processes" if num_processes is None else f"{num_processes} processes"
            raise ConfigError(
                f"devices.num_virtual = {section.num_virtual} cannot be shared by {sharers}.",
                help="use a multiple of the number of processes, and say how many there are.",
            )
        others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(VIRTUAL)]
        os.environ["XLA_FLAGS"] = " ".join([*others, f"{VIRTUAL}={section.num_virtual // num_processes}"])
