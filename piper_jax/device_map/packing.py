"""Placement by rule: tensor and expert inside the fastest domain, data next, pipeline across the slowest."""

from __future__ import annotations

from collections.abc import Sequence

from piper_jax.device_map.boxes import boxed, path_order
from piper_jax.device_map.units import Unit, flattened
from piper_jax.topology import Topology


def packed(units: Sequence[Unit], topology: Topology) -> dict[int, int]:
    """Puts groups into blocks of the network, the largest blocks first, and divides only those that fit nowhere whole.

    A group that is divided is so along its outermost axis: data before expert before tensor. Groups stay in order, so
    that neighbours in the pipeline share a block or have blocks side by side.

    Returns:
      For each logical device its index in ``topology.devices``.
    """
    return _into(units, topology, list(range(len(topology.devices))), 0)


def in_order(units: Sequence[Unit], topology: Topology) -> dict[int, int]:
    """All devices of the groups one after another, along the blocks (and through the torus), whatever they straddle."""
    path = path_order(topology, range(len(topology.devices))) if topology.sides else range(len(topology.devices))
    return dict(zip(flattened(units), sorted(path, key=lambda k: topology.devices[k].blocks[::-1]), strict=False))


def _into(units: Sequence[Unit], topology: Topology, indices: list[int], depth: int) -> dict[int, int]:
    """Units on the devices ``indices``, which share their blocks down to ``depth``."""
    paths = {k: topology.devices[k].path for k in indices}
    if topology.sides and depth == len(topology.levels) - 1:
        tiled = boxed(units, topology, indices)
        if tiled is not None:
            return tiled
        indices = path_order(topology, indices)
    if depth == len(next(iter(paths.values()), ())):
        return dict(zip(flattened(units), indices, strict=False))
    blocks: dict[int, list[int]] = {}
    for k in indices:
        blocks.setdefault(paths[k][depth], []).append(k)
    shares = _shares(units, {number: len(block) for number, block in blocks.items()})
    found: dict[int, int] = {}
    for number, share in shares.items():
        found.update(_into(share, topology, blocks[number], depth + 1))
    return found


def _shares(units: Sequence[Unit], sizes: dict[int, int]) -> dict[int, list[Unit]]:
    """Which units, or parts of them, each block gets."""
    room, order = dict(sizes), list(sizes)
    shares: dict[int, list[Unit]] = {number: [] for number in order}
    waiting, current = list(units)[::-1], 0
    while waiting:
        unit = waiting.pop()
        turns = [*range(current, len(order)), *range(current)]
        fitting = next((k for k in turns if room[order[k]] >= len(unit.devices)), None)
        if fitting is None:
            waiting.extend(reversed(unit.parts))
            current = max(turns, key=lambda k: room[order[k]])
            continue
        current = fitting
        shares[order[fitting]].append(unit)
        room[order[fitting]] -= len(unit.devices)
    return {number: share for number, share in shares.items() if share}
