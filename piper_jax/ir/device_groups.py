"""Facts about device groups: their axes, and groups made of groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from piper_jax.ir.nodes import DeviceGroup


def axes_of(group: DeviceGroup) -> tuple[tuple[str, int], ...]:
    """The axes with their sizes; a flat group has one, ``data``."""
    return group.axes or (("data", len(group.devices)),)


def axis_size(group: DeviceGroup, axes: Iterable[str]) -> int:
    """The number of devices along ``axes``; an axis that the group lacks counts one."""
    sizes = dict(axes_of(group))
    return math.prod(sizes.get(axis, 1) for axis in axes)


def joint_group(groups: Sequence[DeviceGroup]) -> DeviceGroup:
    """One group over the devices of all ``groups``, such as ``g0+g3``; a single group is itself.

    Its axes are ``owner`` (which of the groups) and then theirs where those agree, else ``owner`` over all devices.
    """
    if len(groups) == 1:
        return groups[0]
    devices = tuple(device for group in groups for device in group.devices)
    shapes = {axes_of(group) for group in groups}
    axes = (("owner", len(groups)), *shapes.pop()) if len(shapes) == 1 else (("owner", len(devices)),)
    return DeviceGroup(name="+".join(group.name for group in groups), devices=devices, axes=axes)


def members_of(name: str, groups: Mapping[str, DeviceGroup]) -> tuple[str, ...]:
    """The groups that a joint group joins, by name; of any other group, itself."""
    if "+" not in name:
        return (name,)
    inside = set(groups[name].devices)
    return tuple(g.name for g in groups.values() if "+" not in g.name and inside.issuperset(g.devices))
