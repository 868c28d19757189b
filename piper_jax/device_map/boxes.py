"""Placement in a torus: each group a box of chips, and inside it each of its parts again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from piper_jax.device_map.units import Unit
from piper_jax.topology import Topology

Place = tuple[int, ...]  # coordinates with the core, the slowest axis of the numbering first: (z, y, x, core)


def boxed(units: Sequence[Unit], topology: Topology, indices: Sequence[int]) -> dict[int, int] | None:
    """Puts units of equal size into equal boxes, neighbours beside each other.

    Args:
      indices: the free devices, of one slice.

    Returns:
      For each logical device its index in ``topology.devices``; None where boxes do not fit.
    """
    cells = {(*reversed(topology.devices[k].coords), topology.devices[k].core): k for k in indices}
    sides = (*reversed(topology.sides), topology.num_cores)
    host = (*reversed(topology.host), topology.num_cores)
    sizes = {len(unit.devices) for unit in units}
    if len(sizes) != 1 or not cells:
        return None
    for box in _boxes(sizes.pop(), sides, host):
        grid = [side // length for side, length in zip(sides, box, strict=True)]
        origins = [tuple(i * length for i, length in zip(at, box, strict=True)) for at in _snake(grid)]
        free = [o for o in origins if all(_shifted(o, c) in cells for c in product(*map(range, box)))]
        if len(free) >= len(units):
            found: dict[int, int] = {}
            for unit, origin in zip(units, free, strict=False):
                found.update(_filled(unit, origin, box, cells))
            return found
    return None


def _boxes(size: int, sides: Sequence[int], host: Sequence[int]) -> list[Place]:
    """All boxes of ``size`` devices: those that programs can run on first, then the most compact."""
    lengths = product(*([n for n in range(1, side + 1) if size % n == 0] for side in sides))
    found = [box for box in lengths if math.prod(box) == size]
    return sorted(found, key=lambda box: (not is_legal_box(box, host), sum(box[:-1]), -box[-1], box))


def is_legal_box(box: Sequence[int], host: Sequence[int]) -> bool:
    """Whether a box, placed at a multiple of itself, is whole hosts or inside one; a single device always is."""
    inside = all(bound % length == 0 for length, bound in zip(box, host, strict=True))
    whole = all(length % bound == 0 for length, bound in zip(box, host, strict=True))
    return math.prod(box) == 1 or (box[-1] == host[-1] and (inside or whole))


def _filled(unit: Unit, origin: Place, box: Place, cells: Mapping[Place, int]) -> Iterator[tuple[int, int]]:
    """The devices of a unit in a box: its parts in boxes inside it where these fill it, else along a path."""
    if len(unit.devices) == 1:
        yield unit.devices[0], cells[origin]
        return
    parts = unit.parts
    size = len(parts[0].devices)
    inner = [b for b in _boxes(size, box, box) if all(n % m == 0 for n, m in zip(box, b, strict=True))]
    inner = sorted(inner, key=lambda b: (sum(b[:-1]), -b[-1], b))
    if not inner:
        path = [_shifted(origin, at) for at in _snake(box)]
        yield from ((device, cells[place]) for device, place in zip(unit.devices, path, strict=True))
        return
    small = inner[0]
    grid = [n // m for n, m in zip(box, small, strict=True)]
    for part, at in zip(parts, _snake(grid), strict=True):
        corner = _shifted(origin, [i * m for i, m in zip(at, small, strict=True)])
        yield from _filled(part, corner, small, cells)


def path_order(topology: Topology, indices: Sequence[int]) -> list[int]:
    """Devices of a torus along a path through neighbours."""
    position = {at: k for k, at in enumerate(_snake((*reversed(topology.sides), topology.num_cores)))}
    return sorted(
        indices, key=lambda k: position[*reversed(topology.devices[k].coords), topology.devices[k].core]
    )  # fmt: skip


def _snake(sides: Sequence[int]) -> list[Place]:
    """All places of a box, each beside the one before it."""
    if not sides:
        return [()]
    inner = _snake(sides[1:])
    return [(i, *rest) for i in range(sides[0]) for rest in (reversed(inner) if i % 2 else inner)]


def _shifted(origin: Sequence[int], by: Sequence[int]) -> Place:
    return tuple(o + d for o, d in zip(origin, by, strict=True))
