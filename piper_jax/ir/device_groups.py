"""Facts about device groups: their axes, and groups made of groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from piper_jax.errors import counted
from piper_jax.ir.nodes import DeviceGroup

REPLICA_AXES = ("data", "expert")
"""Mesh axes along which each microbatch is divided."""


def axes_of(group: DeviceGroup) -> tuple[tuple[str, int], ...]:
    """The axes with their sizes; a flat group has one, ``data``."""
    return group.axes or (("data", len(group.devices)),)


def axis_size(group: DeviceGroup, axes: Iterable[str]) -> int:
    """The number of devices along ``axes``; an axis that the group lacks counts one."""
    sizes = dict(axes_of(group))
    return math.prod(sizes.get(axis, 1) for axis in axes)


def impossible(group: DeviceGroup) -> tuple[str, str] | None:
    """Why no group can be like this, and what to do; None where it can."""
    names = [name for name, _ in axes_of(group)]
    if not group.devices or len(set(group.devices)) < len(group.devices):
        return f"group {group.name}: {group.devices} are not distinct device ids from 0.", "list each device once."
    if len(set(names)) < len(names):
        return f"group {group.name}: its axes {', '.join(names)} are not distinct.", "name each axis once."
    needed = axis_size(group, names)
    if needed != len(group.devices):
        axes = " x ".join(f"{name}={extent}" for name, extent in group.axes)
        return (
            f"group {group.name} has {counted(len(group.devices), 'device')}, but its axes {axes} need {needed}.",
            "let the product of the axes be the number of devices.",
        )
    return None


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
