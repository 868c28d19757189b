"""The devices that there are: blocks of the network, processes, coordinates."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from piper_jax.errors import ConfigError

WHOLE_RING = {"v5e": 16, "v6e": 16}  # chips along an axis that is a ring; on the others each multiple of 4 is one


@dataclass(frozen=True, slots=True, kw_only=True)
class PhysicalDevice:
    """Where one device lies.

    Attributes:
      blocks: number of its block at each level of the network but the last, which all share; the fastest first.
      process: that drives it, such as one for each host.
      coords: of its chip in the torus of its slice; empty where there is none.
      core: number on its chip.
    """

    blocks: tuple[int, ...] = ()
    process: int = 0
    coords: tuple[int, ...] = ()
    core: int = 0

    @property
    def path(self) -> tuple[int, ...]:
        """Its blocks from the largest to the smallest; a process is one too, though its links are no faster."""
        return (*reversed(self.blocks), self.process)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Physical devices in the order in which they are given.

    Attributes:
      kind: of device: a profile or a chip, such as ``"h100"`` or ``"v5e"``.
      levels: names, from the fastest to the slowest, such as ``("nvlink", "network")``.
      sides: chips along each axis of the torus of one slice; empty where there is none.
      host: chips of one host along each axis.
    """

    kind: str
    levels: tuple[str, ...]
    devices: tuple[PhysicalDevice, ...]
    sides: tuple[int, ...] = ()
    host: tuple[int, ...] = ()

    @classmethod
    def nested(cls, *domains: tuple[str, int], kind: str = "h100", per_process: int | None = None) -> Topology:
        """Blocks inside blocks, such as ``Topology.nested(("nvlink", 8), ("network", 4))``: 4 hosts of 8 devices.

        Args:
          *domains: for each level, the fastest first, its name and how many of the blocks below (or devices) it has.
          per_process: devices of one process; by default the smallest block is one process.

        Raises:
          ConfigError: a size is not a number from 1.
        """
        if not domains or any(size < 1 for _, size in domains):
            raise ConfigError(
                f"Topology.nested{domains}: a level has no size.", help="such as ('nvlink', 8), ('network', 4)."
            )
        sizes = [math.prod(size for _, size in domains[: k + 1]) for k in range(len(domains))]
        chunk = per_process or sizes[0]
        devices = tuple(
            PhysicalDevice(blocks=tuple(d // size for size in sizes[:-1]), process=d // chunk) for d in range(sizes[-1])
        )
        return cls(kind=kind, levels=tuple(name for name, _ in domains), devices=devices)

    @classmethod
    def torus(
        cls, *sides: int, kind: str, host: Sequence[int] | None = None, cores: int = 1, slices: int = 1
    ) -> Topology:
        """Slices of chips with links to their neighbours along each axis, numbered as TPUs are: the first axis fastest.

        Args:
          *sides: chips along each axis.
          host: chips of one host along each axis; by default up to 2 x 2.
          cores: devices of one chip.  slices: how many, connected by the slower level.

        Raises:
          ConfigError: the hosts do not fill the slice.
        """
        bounds = tuple(host or (min(2, side) if axis < 2 else 1 for axis, side in enumerate(sides)))
        if any(side % bound for side, bound in zip(sides, bounds, strict=True)):
            raise ConfigError(f"hosts of {by(bounds)} chips do not fill {by(sides)}.", help="give whole hosts.")
        hosts = [side // bound for side, bound in zip(sides, bounds, strict=True)]
        found = [
            PhysicalDevice(
                blocks=(slice_index,), core=core, coords=(coords := tuple(reversed(place))),
                process=slice_index * math.prod(hosts) + _number(coords, bounds, hosts),
            )
            for slice_index in range(slices)
            for place in product(*(range(side) for side in reversed(sides)))
            for core in range(cores)
        ]  # fmt: skip
        return cls(kind=kind, levels=("ici", "dcn"), devices=tuple(found), sides=sides, host=bounds)

    @property
    def is_flat(self) -> bool:
        """Whether any device is as near to any other, in one process."""
        return not self.sides and len({device.path for device in self.devices}) <= 1

    @property
    def num_cores(self) -> int:
        """Devices of one chip."""
        return 1 + max((device.core for device in self.devices), default=0)

    def level(self, indices: Iterable[int]) -> int:
        """The fastest level with one block that holds all these devices."""
        blocks = [self.devices[k].blocks for k in indices]
        return next(
            (k for k in range(len(self.levels) - 1) if len({found[k] for found in blocks}) <= 1), len(self.levels) - 1
        )

    def hops(self, a: int, b: int) -> int:
        """Links between two devices of one slice, 1 at least; 1 where there is no torus."""
        first, second = self.devices[a], self.devices[b]
        total = 0
        for axis, side in enumerate(self.sides):
            apart = abs(first.coords[axis] - second.coords[axis])
            total += min(apart, side - apart) if self._is_ring(side) else apart
        return max(total, 1)

    def _is_ring(self, side: int) -> bool:
        return side == WHOLE_RING[self.kind] if self.kind in WHOLE_RING else side % 4 == 0

    def processes(self, indices: Collection[int]) -> tuple[int, ...]:
        """The processes that drive these devices."""
        return tuple(sorted({self.devices[k].process for k in indices}))

    def __str__(self) -> str:
        """Such as ``16 devices of h100: 2 x nvlink of 8, network; 2 processes``."""
        parts: list[str] = []
        for level, name in enumerate(self.levels[:-1]):
            sizes = [tuple(d.blocks[level:]) for d in self.devices]
            blocks = {block: sizes.count(block) for block in sizes}
            counts = sorted(set(blocks.values()))
            each = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
            parts.append(f"{len(blocks)} x {name} of {each}")
        torus = f", a torus of {by(self.sides)}" if self.sides else ""
        processes = len({d.process for d in self.devices})
        found = ", ".join([*parts, self.levels[-1]])
        count = f"{len(self.devices)} device{'' if len(self.devices) == 1 else 's'}"
        return f"{count} of {self.kind}: {found}{torus}; {processes} process{'' if processes == 1 else 'es'}"


def by(sides: Iterable[int]) -> str:
    """``2x4x1``."""
    return "x".join(map(str, sides))


def _number(coords: Sequence[int], bounds: Sequence[int], hosts: Sequence[int]) -> int:
    """The number of the host of a chip, the first axis fastest."""
    number = 0
    for coord, bound, count in reversed(list(zip(coords, bounds, hosts, strict=True))):
        number = number * count + coord // bound
    return number
