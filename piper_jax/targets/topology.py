"""The devices of a target, for lowering and compiling alone: nothing can be put on them."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from piper_jax.errors import ConfigError
from piper_jax.targets.profiles import Target


def require_compiler(target: Target) -> None:
    """Checks that the target's compiler is installed, and sets the variables that it reads.

    Raises:
      ConfigError: it is not; names the extra to install.
    """
    platform = target.platform
    if importlib.util.find_spec(platform.package) is None:
        raise ConfigError(
            f"target {target}: its compiler ({platform.package}) is not installed.",
            help=f"pip install 'piper-jax[{platform.extra}]' (compiling needs no {target.family.upper()}).",
        )
    for name, value in platform.environment.items():
        os.environ.setdefault(name, value)


def topology_devices(target: Target) -> list[Any]:
    """All devices of a target, in the order in which plans number them.

    Raises:
      ConfigError: the compiler is not installed, or knows no such shape.
    """
    require_compiler(target)
    from jax.experimental import topologies

    sizes = "x".join(map(str, target.shape))
    try:
        if target.family == "gpu":
            shape = f"{target.shape[0]}x1x{target.shape[1]}"
            found = topologies.get_topology_desc(
                platform="cuda", topology_name=shape, topology=shape, target_config=target.chip.config
            )
        else:
            found = topologies.get_topology_desc(platform="tpu", topology_name=f"{target.chip.name}:{sizes}")
    except Exception as error:
        raise ConfigError(
            f"target {target}: its compiler gives no such devices.", detail=[str(error)],
            help="TPU slices are whole hosts, such as 2x2x1 or 4x4x4; give the shape that you would ask for.",
        ) from error  # fmt: skip
    return list(found.devices)
