"""Where groups lie in the network: those that compute, and the level that a set of devices shares."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Compute, DeviceGroup
from piper_jax.simulation.hardware import Hardware, Level


def compute_groups(dag: Dag) -> tuple[str, ...]:
    """The groups that compute, in the order of ``dag.groups``."""
    used = {node.group for node in dag.nodes.values() if isinstance(node, Compute)}
    return tuple(name for name in dag.groups if name in used)


def level_between(hardware: Hardware, devices: Iterable[int]) -> Level:
    """The fastest level with one block that contains all ``devices``."""
    ids = list(devices)
    first, last = min(ids), max(ids)
    for level in hardware.levels:
        if level.num_devices is None or first // level.num_devices == last // level.num_devices:
            return level
    return hardware.levels[-1]


def devices_along(group: DeviceGroup, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """The sets of devices of ``group`` that communicate with each other over ``axes`` (all devices if empty)."""
    if not axes or not group.axes:
        return [group.devices]
    sizes = [size for _, size in group.axes]
    strides = [1] * len(sizes)
    for position in range(len(sizes) - 2, -1, -1):
        strides[position] = strides[position + 1] * sizes[position + 1]
    along = [name in axes for name, _ in group.axes]
    inner = _offsets([(size, stride) for size, stride, chosen in zip(sizes, strides, along, strict=True) if chosen])
    outer = _offsets([(size, stride) for size, stride, chosen in zip(sizes, strides, along, strict=True) if not chosen])
    return [tuple(group.devices[start + offset] for offset in inner) for start in outer]


def _offsets(dims: list[tuple[int, int]]) -> list[int]:
    ranges = [[index * stride for index in range(size)] for size, stride in dims]
    return [sum(combination) for combination in product(*ranges)]
