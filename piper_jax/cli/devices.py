"""The devices section takes effect through the environment, before JAX is imported."""

from __future__ import annotations

import os
import sys

from piper_jax.config import DevicesSection

VIRTUAL = "--xla_force_host_platform_device_count"


def prepare_devices(section: DevicesSection) -> None:
    """Sets ``JAX_PLATFORMS`` and the number of virtual CPU devices; does nothing once JAX is imported."""
    if "jax" in sys.modules:
        return
    if section.platform is not None:
        os.environ["JAX_PLATFORMS"] = section.platform
    if section.num_virtual is not None:
        others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(VIRTUAL)]
        os.environ["XLA_FLAGS"] = " ".join([*others, f"{VIRTUAL}={section.num_virtual}"])
