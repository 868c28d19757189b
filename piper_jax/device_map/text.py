"""A device map as tables: where each group lies, and what crosses slow links."""

from __future__ import annotations

from collections.abc import Sequence

from piper_jax.device_map.base import DeviceMap
from piper_jax.device_map.crossings import Crossing
from piper_jax.device_map.slices import slice_fault
from piper_jax.ir.columns import aligned, bytes_text
from piper_jax.ir.device_groups import axes_of
from piper_jax.ir.nodes import DeviceGroup
from piper_jax.ir.selection import numbers_text
from piper_jax.topology.base import by
from piper_jax.visualization.labels import time_text

MAX_ROWS = 16


def map_text(device_map: DeviceMap) -> str:
    """The heading, a line for each group, and the communication that leaves the fastest links."""
    rows = [_group_row(device_map, group) for group in device_map.groups]
    header = ("group", "axes", "on devices", "processes", "within", "")
    lines = [
        f"devices  {device_map.topology}",
        "",
        *aligned(header, _shortened(rows, len(header)), left=len(header)),
        *crossing_lines(device_map),
    ]
    return "\n".join(lines)


def crossing_lines(device_map: DeviceMap) -> list[str]:
    """What crosses slow links, and a last line that says whether it need to."""
    if not device_map.crossings:
        return []
    header = ("communication", "between", "over", "runs", "bytes a step", "time a step", "best", "by the best over")
    rows = [_crossing_row(crossing) for crossing in device_map.crossings]
    return ["", *aligned(header, _shortened(rows, len(header)), left=3, left_from=7), "", verdict(device_map)]


def verdict(device_map: DeviceMap) -> str:
    """One line: whether the placement is the best that is known, or what it costs beyond it."""
    profile = f"by the profile {device_map.hardware.name}, each alone"
    total = sum(crossing.seconds for crossing in device_map.crossings)
    excess = device_map.excess_seconds
    if excess <= 1e-6 * total:
        return f"best placement known: {time_text(total, 's')} a step over slow links ({profile})"
    return f"{time_text(excess, 's')} a step more than under DeviceMap.of(plan, devices) ({profile})"


def _group_row(device_map: DeviceMap, group: DeviceGroup) -> tuple[str, ...]:
    topology, indices = device_map.topology, device_map.physical(group)
    axes = " ".join(f"{axis}={size}" for axis, size in axes_of(group) if size > 1) or "one device"
    level = topology.levels[topology.level(indices)]
    fault = slice_fault(topology, indices)
    coords = [topology.devices[k].coords for k in indices] if topology.sides else []
    corner = f" from {min(coords)}" if coords else ""
    box = by(max(along) - min(along) + 1 for along in zip(*coords, strict=True)) if coords else ""
    where = f"{level}, {box} chips{corner}" if box else level
    return (
        group.name, axes, _ids(indices), numbers_text(topology.processes(indices)), where,
        f"no slice: {fault}" if fault else "",
    )  # fmt: skip


def _crossing_row(crossing: Crossing) -> tuple[str, ...]:
    return (
        crossing.what, crossing.where, _way(crossing.level, crossing.hops), str(crossing.num_runs),
        bytes_text(crossing.step_bytes), time_text(crossing.seconds, "s"), time_text(crossing.best_seconds, "s"),
        _way(crossing.best_level, crossing.best_hops),
    )  # fmt: skip


def _way(level: str, hops: int) -> str:
    return f"{level}, {hops} links" if hops > 1 else level


def _ids(indices: Sequence[int]) -> str:
    return (
        numbers_text(indices)
        if list(indices) == sorted(indices)
        else ", ".join(map(str, indices[:8])) + (f", ... {len(indices) - 8} more" if len(indices) > 8 else "")
    )


def _shortened(rows: Sequence[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    more = [(f"... {len(rows) - MAX_ROWS} more", *[""] * (width - 1))] if len(rows) > MAX_ROWS else []
    return [*rows[:MAX_ROWS], *more]
