"""Logical devices on physical ones: which level of the network and how many links lie between those of a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from piper_jax.topology.base import PhysicalDevice, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Attributes:
    physical: for each logical device, its index in ``topology.devices``.
    """

    topology: Topology
    physical: tuple[int, ...]

    def level(self, logical: Iterable[int]) -> int:
        """The fastest level with one block that holds all these logical devices."""
        return self.topology.level(self.physical[d] for d in logical)

    def num_inside(self, logical: Sequence[int], level: int) -> int:
        """How many of them are in the block, of the level below ``level``, of the first."""
        if not level:
            return 1
        blocks = [self.topology.devices[self.physical[d]].blocks[level - 1] for d in logical]
        return blocks.count(blocks[0])

    def hops(self, first: int, second: int) -> int:
        """Links between two logical devices."""
        return self.topology.hops(self.physical[first], self.physical[second])

    def reach(self, logical: Sequence[int]) -> int:
        """The longest hop that connects these devices, each to its nearest (a bottleneck spanning tree); 1 in a box.

        Sets that are strided by k share the links between them with k - 1 others, so this is also what remains of the
        bandwidth of a link: 1 / k.
        """
        if not self.topology.sides or self.level(logical):
            return 1
        chips = {self.topology.devices[self.physical[d]].coords for d in logical}
        if math.prod(max(along) - min(along) + 1 for along in zip(*chips, strict=True)) == len(chips):
            return 1
        longest, first = 1, logical[0]
        distance = {d: self.hops(first, d) for d in logical[1:]}
        while distance:
            nearest = min(distance, key=distance.__getitem__)
            longest = max(longest, distance.pop(nearest))
            for d in distance:
                distance[d] = min(distance[d], self.hops(nearest, d))
        return longest


def consecutive_layout(levels: Sequence[tuple[str, int | None]], num_devices: int) -> Layout:
    """Logical ids in blocks of consecutive ones; each level by its name and the devices of a block."""
    sizes = [size or num_devices for _, size in levels[:-1]]
    devices = tuple(PhysicalDevice(blocks=tuple(d // size for size in sizes)) for d in range(num_devices))
    topology = Topology(kind="", levels=tuple(name for name, _ in levels), devices=devices)
    return Layout(topology=topology, physical=tuple(range(num_devices)))
