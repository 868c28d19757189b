"""What a placement costs: each communication of a step, the level of the network that it crosses, and its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Collective, Send
from piper_jax.simulation.costs.network import Network
from piper_jax.simulation.hardware import Hardware
from piper_jax.simulation.sizes import Sizes
from piper_jax.topology import Layout

Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One kind of communication between the same devices, in one step.

    Attributes:
      what: such as ``"all_reduce over data"`` or ``"send"``.
      where: the group, or ``"g0 -> g1"``.
      level: of the network, such as ``"network"``.  hops: links of a torus between neighbours.
      num_runs: of a step.  step_bytes: of all runs, on one device.
      seconds: of all runs, each by itself, by the profile of the hardware.
      best_level, best_hops, best_seconds: the same under the best placement that is known.
    """

    what: str
    where: str
    level: str
    hops: int
    num_runs: int
    step_bytes: int
    seconds: float
    best_level: str
    best_hops: int
    best_seconds: float

    @property
    def excess_seconds(self) -> float:
        """What a step spends on it more than under the best placement; below 0 where that gives it less room."""
        return self.seconds - self.best_seconds


@dataclass(slots=True, kw_only=True)
class Traffic:
    """The communication of one step as distinct nodes with their numbers of runs; priced for any layout.

    Attributes:
      runs: for each kind and place of communication, its distinct nodes and how often each runs.
    """

    dag: Dag
    hardware: Hardware
    sizes: Sizes
    runs: dict[Key, list[tuple[Send | Collective, int]]] = field(
        default_factory=dict[Key, "list[tuple[Send | Collective, int]]"]
    )

    @classmethod
    def of(cls, dag: Dag, hardware: Hardware) -> Traffic:
        """Of a completed ``dag``."""
        same: dict[tuple[object, ...], list[Send | Collective]] = {}
        for node in dag.nodes.values():
            match node:
                case Send():
                    same.setdefault((node.group, node.peer, node.values), []).append(node)
                case Collective():
                    key = node.group, node.kind, node.axes, node.values, node.bucket
                    same.setdefault(key, []).append(node)
                case _:
                    pass
        found = cls(dag=dag, hardware=hardware, sizes=Sizes(dag))
        for nodes in same.values():
            found.runs.setdefault(_name(nodes[0]), []).append((nodes[0], len(nodes)))
        return found

    def seconds(self, layout: Layout) -> float:
        """Of all communication of a step, one after another."""
        network = self._network(layout)
        return sum(_seconds(network, node) * count for nodes in self.runs.values() for node, count in nodes)

    def crossings(self, layout: Layout, best: Layout) -> tuple[Crossing, ...]:
        """What leaves the fastest level or its neighbours in the torus, the dearest beyond the best placement first."""
        here, there = self._network(layout), self._network(best)
        found = [self._crossing(key, nodes, here, there) for key, nodes in self.runs.items()]
        fastest = layout.topology.levels[0]
        slow = [c for c in found if c.seconds > 0 and (c.level != fastest or c.hops > 1)]
        return tuple(sorted(slow, key=lambda c: (-c.excess_seconds, -c.seconds)))

    def _crossing(
        self, key: Key, nodes: Sequence[tuple[Send | Collective, int]], here: Network, there: Network
    ) -> Crossing:
        (number, hops), (best_number, best_hops) = here.way(nodes[0][0]), there.way(nodes[0][0])
        return Crossing(
            what=key[0], where=key[1],
            level=here.layout.topology.levels[number], hops=hops,
            num_runs=sum(count for _, count in nodes),
            step_bytes=sum(self._bytes(here, node) * count for node, count in nodes),
            seconds=sum(_seconds(here, node) * count for node, count in nodes),
            best_level=there.layout.topology.levels[best_number], best_hops=best_hops,
            best_seconds=sum(_seconds(there, node) * count for node, count in nodes),
        )  # fmt: skip

    def _bytes(self, network: Network, node: Send | Collective) -> int:
        if isinstance(node, Collective):
            return network.collective_bytes(node)
        return sum(self.sizes.value_bytes(name, node.group or "") for name in node.values)

    def _network(self, layout: Layout) -> Network:
        return Network(self.dag, self.hardware, self.sizes, layout)


def _seconds(network: Network, node: Send | Collective) -> float:
    return (network.transfer(node) if isinstance(node, Send) else network.collective(node)).duration


def _name(node: Send | Collective) -> Key:
    if isinstance(node, Send):
        return "send", f"{node.group} -> {node.peer}"
    return f"{node.kind} over {', '.join(node.axes) or 'all'}", node.group or ""
