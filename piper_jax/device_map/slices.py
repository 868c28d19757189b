"""Which sets of TPU devices a program can be compiled for: boxes of whole hosts, or boxes inside one host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from piper_jax.device_map.boxes import is_legal_box
from piper_jax.errors import counted
from piper_jax.topology import Topology
from piper_jax.topology.base import by


def slice_fault(topology: Topology, indices: Sequence[int]) -> str:
    """Why no program can be compiled for these devices of a torus; empty where one can.

    Devices of several slices are looked at slice by slice.
    """
    if not topology.sides or len(indices) == 1:
        return ""
    devices = [topology.devices[k] for k in indices]
    slices = {d.blocks for d in devices}
    if len(slices) > 1:
        parts = ([k for k in indices if topology.devices[k].blocks == found] for found in sorted(slices))
        return next(filter(None, (slice_fault(topology, part) for part in parts)), "")
    chips = {d.coords for d in devices}
    if len(chips) * topology.num_cores != len(devices):
        return f"it has parts of chips of {counted(topology.num_cores, 'device')}"
    box = _bounding_box(chips)
    if math.prod(box) != len(chips):
        return f"its {len(chips)} chips are no box: they lie in one of {by(box)}"
    hosts = {d.process for d in devices}
    if len(hosts) > 1 and len(devices) != sum(d.process in hosts and d.blocks in slices for d in topology.devices):
        return f"its box of {by(box)} chips cuts through hosts of {by(topology.host)}"
    return ""


def nearest_slices(topology: Topology, num_devices: int) -> str:
    """The slices of the nearest numbers of devices, such as ``"2x2 chips (4 devices) or 2x4 chips (8 devices)"``."""
    legal = slices_by_size(topology)
    below = max((n for n in legal if n < num_devices), default=None)
    above = min((n for n in legal if n > num_devices), default=None)
    chosen = [num_devices] if num_devices in legal else [n for n in (below, above) if n is not None]
    return " or ".join(f"{by(legal[n])} chips ({n} device{'' if n == 1 else 's'})" for n in chosen)


def slices_by_size(topology: Topology) -> dict[int, tuple[int, ...]]:
    """Numbers of devices that a slice can have, each with the chips of the most compact one along each axis."""
    lengths = product(*(range(1, side + 1) for side in topology.sides))
    found: dict[int, tuple[int, ...]] = {}
    for box in sorted(lengths, key=lambda box: (sum(box), box)):
        if is_legal_box((*box, topology.num_cores), (*topology.host, topology.num_cores)):
            found.setdefault(math.prod(box) * topology.num_cores, box)
    return found


def _bounding_box(chips: set[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(max(along) - min(along) + 1 for along in zip(*chips, strict=True))
