"""Where a plan would lie on a target. No compiler is asked."""

from __future__ import annotations

from piper_jax.device_map import DeviceMap
from piper_jax.errors import ConfigError, counted
from piper_jax.planning import Plan
from piper_jax.simulation import HARDWARE
from piper_jax.targets.profiles import Target, parse_target


def map_onto(plan: Plan, target: str | Target) -> DeviceMap:
    """The best placement known of a plan on the devices of a target, such as ``"gpu:h100:2x8"``.

    Raises:
      ConfigError: an unknown target, or it has too few devices.
    """
    needed = 1 + max(d for group in plan.complete().groups.values() for d in group.devices)
    found = (parse_target(target) if isinstance(target, str) else target).for_devices(needed)
    if needed > found.num_devices:
        raise ConfigError(
            f"target {found} has {counted(found.num_devices, 'device')}; the plan needs {needed}.",
            help="name a larger target, or lower data_parallel or pipeline_parallel.",
        )
    return DeviceMap.of(plan, found.topology, hardware=HARDWARE.get(found.chip.name))
