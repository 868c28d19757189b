"""Where groups lie in the network: those that compute, those that communicate, and the levels between them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Compute, DeviceGroup
from piper_jax.simulation.hardware import Hardware, Level
from piper_jax.topology import Layout, consecutive_layout


def compute_groups(dag: Dag) -> tuple[str, ...]:
    """The groups that compute, in the order of ``dag.groups``."""
    used = {node.group for node in dag.nodes.values() if isinstance(node, Compute)}
    return tuple(name for name in dag.groups if name in used)


def level_between(hardware: Hardware, devices: Iterable[int]) -> Level:
    """The fastest level with one block of consecutive ids that contains all ``devices``."""
    ids = list(devices)
    return level_of(hardware, consecutive(hardware, 1 + max(ids)).level(ids))


def consecutive(hardware: Hardware, num_devices: int) -> Layout:
    """Logical ids on blocks of consecutive ones, as the levels of ``hardware`` are sized."""
    return consecutive_layout([(level.name, level.num_devices) for level in hardware.levels], num_devices)


def level_of(hardware: Hardware, number: int) -> Level:
    """The rates of a level of a topology, counted from the fastest; the slowest where the profile has fewer."""
    return hardware.levels[min(number, len(hardware.levels) - 1)]


def pairs_between(source: DeviceGroup, target: DeviceGroup) -> list[tuple[int, int]]:
    """Which devices of two groups exchange values: equal positions where they are as many, else any with any."""
    if len(source.devices) == len(target.devices):
        return list(zip(source.devices, target.devices, strict=True))
    return list(product(source.devices, target.devices))


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
