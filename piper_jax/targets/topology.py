"""The devices of a target, for lowering and compiling alone: nothing can be put on them."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from piper_jax.device_map.slices import slices_by_size
from piper_jax.errors import ConfigError
from piper_jax.targets.profiles import Target, parse_target
from piper_jax.topology import PhysicalDevice, Topology, topology_of


def require_compiler(target: Target) -> None:
    """Checks that the target's compiler is installed, and sets the variables that it reads.

    Raises:
      ConfigError: it is not; names the extra to install.
    """
    platform = target.platform
    if platform.package and importlib.util.find_spec(platform.package) is None:
        raise ConfigError(
            f"target {target}: its compiler ({platform.package}) is not installed.",
            help=f"pip install 'piper-jax[{platform.extra}]' (compiling needs no {target.family.upper()}).",
        )
    for name, value in platform.environment.items():
        os.environ.setdefault(name, value)


def topology_devices(target: Target) -> tuple[Topology, list[Any]]:
    """All devices of a target, and the same as data, in one order.

    Raises:
      ConfigError: the compiler is not installed, or knows no such shape.
    """
    require_compiler(target)
    import jax

    if target.family == "cpu":
        devices = jax.devices("cpu")
        if len(devices) < target.num_devices:
            raise ConfigError(
                f"target {target}: there are {len(devices)} CPU devices.",
                help=f"XLA_FLAGS=--xla_force_host_platform_device_count={target.num_devices}, set before JAX starts.",
            )
        return target.topology, devices[: target.num_devices]
    devices = list(_described(str(target)))
    return (topology_of(devices, target.chip.name) if target.family == "tpu" else target.topology), devices


def stand_in(target: Target) -> Callable[[Any], Any]:
    """The mesh to compile for in place of one whose devices are a part of a TPU slice: a slice of that shape alone.

    The compiler takes some parts for themselves and fails or aborts at others. Boxes inside one host become a corner of
    it; what is no box, such as three groups together, becomes a slice of as many devices, or stays if there is none.
    """
    if target.family != "tpu":
        return lambda mesh: mesh

    def instead(mesh: Any) -> Any:
        from jax.sharding import Mesh

        topology = topology_of(list(mesh.devices.flat), target.chip.name)
        chips = {device.coords for device in topology.devices}
        host = target.topology.host
        if math.prod(topology.sides) != len(chips):
            return _of_equal_size(mesh, target)
        sides = tuple(-(-side // bound) * bound for side, bound in zip(topology.sides, host, strict=True))
        found = _described(str(replace(target, shape=sides)))
        known = {
            _place(d): device for d, device in zip(topology_of(found, target.chip.name).devices, found, strict=True)
        }
        array = mesh.devices.copy()
        array.flat = [known[_place(d)] for d in topology.devices]
        return Mesh(array, mesh.axis_names, axis_types=mesh.axis_types)

    return instead


def _of_equal_size(mesh: Any, target: Target) -> Any:
    """The same mesh on the most compact slice of as many devices in whole hosts, if there is one."""
    from jax.sharding import Mesh

    box = slices_by_size(target.topology).get(mesh.size)
    if box is None or any(side % bound for side, bound in zip(box, target.topology.host, strict=True)):
        return mesh
    array = mesh.devices.copy()
    array.flat = _described(str(replace(target, shape=box)))
    return Mesh(array, mesh.axis_names, axis_types=mesh.axis_types)


def _place(device: PhysicalDevice) -> tuple[tuple[int, ...], int]:
    return device.coords, device.core


@cache
def _described(text: str) -> tuple[Any, ...]:
    """The devices of a target, which is known by its name: its compiler is asked once."""
    from jax.experimental import topologies

    target = parse_target(text)
    try:
        if target.family == "gpu":
            shape = f"{target.shape[0]}x1x{target.shape[1]}"
            found = topologies.get_topology_desc(
                platform="cuda", topology_name=shape, topology=shape, target_config=target.chip.config
            )
        else:
            found = topologies.get_topology_desc(platform="tpu", topology_name=text.removeprefix("tpu:"))
    except Exception as error:
        raise ConfigError(
            f"target {target}: its compiler gives no such devices.", detail=[str(error)],
            help="TPU slices are whole hosts, such as 2x2x1 or 4x4x4; give the shape that you would ask for.",
        ) from error  # fmt: skip
    return tuple(found.devices)
