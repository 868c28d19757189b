"""Costs of communication: latency and bandwidth of the network level that a transfer or a collective crosses."""

from __future__ import annotations

import math

from piper_jax.ir.dag import Dag
from piper_jax.ir.device_groups import members_of
from piper_jax.ir.nodes import Collective, DeviceGroup, Send
from piper_jax.simulation.costs.base import Cost, Link
from piper_jax.simulation.hardware import Hardware
from piper_jax.simulation.sizes import Sizes
from piper_jax.simulation.topology import consecutive, devices_along, level_of, pairs_between
from piper_jax.topology import Layout


class Network:
    """Durations of transfers and collectives of one plan on one kind of hardware, and the links that they hold.

    Collectives move what a bandwidth-optimal algorithm moves (2 (n-1)/n of the bytes for all_reduce, (n-1)/n for the
    others) in a logarithmic number of latency steps (Thakur et al. 2005; one step for all_to_all). Where neighbours of
    a set are k links of a torus apart, they have 1 / k of each link, and k times the latency.

    Attributes:
      layout: where the logical devices are; by default on consecutive physical ones.
    """

    def __init__(self, dag: Dag, hardware: Hardware, sizes: Sizes, layout: Layout | None = None):
        self._dag, self._hardware, self._sizes = dag, hardware, sizes
        count = 1 + max((max(group.devices) for group in dag.groups.values()), default=0)
        self.layout = layout or consecutive(hardware, count)
        self._transfers: dict[tuple[str, str, tuple[str, ...]], Cost] = {}
        self._ways: dict[tuple[str, str | tuple[str, ...]], tuple[int, int]] = {}
        self._collectives: dict[tuple[str, str, tuple[str, ...], tuple[str, ...], str | None], Cost] = {}

    def transfer(self, node: Send) -> Cost:
        """The slower of what one device sends and what one device receives."""
        src, dst = node.group or "", node.peer
        key = (src, dst, node.values)
        found = self._transfers.get(key)
        if found is None:
            number, hops = self.way(node)
            level = level_of(self._hardware, number)
            nbytes = max(sum(self._sizes.value_bytes(name, side) for name in node.values) for side in (src, dst))
            links = (Link(src, level.name, "out"), Link(dst, level.name, "in"))
            found = self._transfers[key] = Cost(hops * (level.latency_seconds + nbytes / level.bandwidth), links)
        return found

    def collective(self, node: Collective) -> Cost:
        """A collective over the axes of the node; free if only one device takes part."""
        name = node.group or ""
        key = (name, node.kind, node.axes, node.values, node.bucket)
        found = self._collectives.get(key)
        if found is None:
            found = self._collectives[key] = self._collective(node, self._dag.groups[name])
        return found

    def _collective(self, node: Collective, group: DeviceGroup) -> Cost:
        sets = devices_along(group, node.axes)
        num_devices = len(sets[0])
        if num_devices <= 1:
            return Cost(0.0)
        number, hops = self.way(node)
        level = level_of(self._hardware, number)
        bandwidth = self._ring_bandwidth(number, sets[0])
        nbytes = self.collective_bytes(node)
        share, steps = (num_devices - 1) / num_devices, math.ceil(math.log2(num_devices))
        match node.kind:
            case "all_reduce":
                duration = 2 * (share * nbytes / bandwidth + steps * level.latency_seconds)
            case "all_gather" | "reduce_scatter":
                duration = share * nbytes / bandwidth + steps * level.latency_seconds
            case "all_to_all":
                duration = share * nbytes / level.bandwidth + level.latency_seconds
        directions = ("out", "in")
        links = tuple(
            Link(member, level.name, way) for member in members_of(group.name, self._dag.groups) for way in directions
        )
        return Cost(hops * duration, links)

    def collective_bytes(self, node: Collective) -> int:
        """Bytes of the whole (gathered or not yet scattered) operand on one device."""
        group = members_of(node.group or "", self._dag.groups)[0]
        nbytes = sum(self._sizes.value_bytes(name, group) for name in node.values)
        return math.ceil(nbytes * self._sizes.room(node.around, group)) if node.around else nbytes

    def way(self, node: Send | Collective) -> tuple[int, int]:
        """The level that a transfer or collective crosses, from 0 for the fastest, and the links between neighbours."""
        key = node.group or "", node.peer if isinstance(node, Send) else node.axes
        if key not in self._ways:
            self._ways[key] = self._way(node)
        return self._ways[key]

    def _way(self, node: Send | Collective) -> tuple[int, int]:
        groups, layout = self._dag.groups, self.layout
        if isinstance(node, Send):
            pairs = pairs_between(groups[node.group or ""], groups[node.peer])
            number = max(layout.level(pair) for pair in pairs)
            return number, 1 if number else max(layout.hops(*pair) for pair in pairs)
        sets = devices_along(groups[node.group or ""], node.axes)
        number = max(layout.level(devices) for devices in sets)
        return number, 1 if number else max(layout.reach(devices) for devices in sets)

    def _ring_bandwidth(self, number: int, devices: tuple[int, ...]) -> float:
        """Across blocks of the level below, the members inside one block share their outgoing links."""
        level = level_of(self._hardware, number)
        if number == 0:
            return level.ring_bandwidth
        below, inside = level_of(self._hardware, number - 1), self.layout.num_inside(devices, number)
        return min(below.ring_bandwidth, inside * level.ring_bandwidth) if inside > 1 else level.ring_bandwidth
