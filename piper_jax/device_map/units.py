"""What is to be placed: the devices of a group as an array, so that it can be divided where its links may be slow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from piper_jax.ir.device_groups import axes_of
from piper_jax.ir.nodes import DeviceGroup

INNERMOST = ("data", "expert", "tensor")  # the last has the most to say to its neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Logical devices, row-major over ``sizes``; the innermost should be nearest to each other."""

    devices: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, group: DeviceGroup) -> Unit:
        """A whole group: tensor innermost, then expert, then data, in whatever order its axes are declared."""
        axes = axes_of(group)
        order = sorted(range(len(axes)), key=lambda k: INNERMOST.index(axes[k][0]) if axes[k][0] in INNERMOST else -1)
        sizes = [size for _, size in axes]
        strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
        places = product(*(range(sizes[k]) for k in order))
        devices = tuple(
            group.devices[sum(i * strides[k] for i, k in zip(place, order, strict=True))] for place in places
        )
        return cls(devices=devices, sizes=tuple(sizes[k] for k in order if sizes[k] > 1))

    @property
    def parts(self) -> tuple[Unit, ...]:
        """Divided along its outermost axis."""
        size = len(self.devices) // self.sizes[0] if self.sizes else 1
        starts = range(0, len(self.devices), size)
        return tuple(Unit(devices=self.devices[s : s + size], sizes=self.sizes[1:]) for s in starts)


def units_of(groups: Mapping[str, DeviceGroup]) -> list[Unit]:
    """Each group, without those that join others, in the order of their devices."""
    return [Unit.of(g) for g in sorted(groups.values(), key=lambda g: min(g.devices)) if "+" not in g.name]


def flattened(units: Iterable[Unit]) -> list[int]:
    """All logical devices of ``units``, in order."""
    return [device for unit in units for device in unit.devices]
