"""Memory of one device of each group over time, by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from piper_jax.ir.dag import Dag
from piper_jax.ir.device_groups import members_of
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, DataEdge, Node, Recv, Send, Update
from piper_jax.simulation.report import MEMORY_KINDS, GroupMemory, MemoryStep
from piper_jax.simulation.sizes import Sizes
from piper_jax.simulation.topology import compute_groups

ACTIVATIONS, GRADIENTS, TRANSFERS = (MEMORY_KINDS.index(kind) for kind in ("activations", "gradients", "transfers"))
PARAMETERS, OPTIMIZER = MEMORY_KINDS.index("parameters"), MEMORY_KINDS.index("optimizer")

Interval = tuple[float, float]
Buffer = list[float]  # start, end, bytes, kind


def memory_of_groups(dag: Dag, interval: Callable[[NodeId], Interval]) -> dict[str, GroupMemory]:
    """The memory of one device of each computing group.

    A value lives from the start of its producer (a received one: from the start of its transfer) to the end of its last
    consumer on the group. Gradients accumulate in one buffer, from the first backward of the bucket to its reduction or
    update. Parameters and optimizer state are there throughout.

    Args:
      interval: start and end of the program that a node is part of.
    """
    sizes = Sizes(dag)
    buffers = _Buffers(dag, sizes, interval)
    for edge in dag.data:
        buffers.add(edge)
    changes: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
    for group, (start, end, nbytes, kind) in buffers.all():
        changes[group].append((start, int(nbytes), int(kind)))
        changes[group].append((end, -int(nbytes), int(kind)))
    resident = _resident_bytes(dag, sizes)
    return {group: _timeline(changes[group], resident[group]) for group in compute_groups(dag)}


class _Buffers:
    """Lifetimes by what identifies a buffer."""

    def __init__(self, dag: Dag, sizes: Sizes, interval: Callable[[NodeId], Interval]):
        self._nodes, self._sizes, self._interval, self._buckets = dag.nodes, sizes, interval, dag.buckets
        self._groups = dag.groups
        self._last_updates = _last_updates(dag, interval)
        self._bytes: dict[tuple[str, str], int] = {}
        self._values: dict[tuple[NodeId, str, str], Buffer] = {}
        self._gradients: dict[tuple[str, str, object], Buffer] = {}

    def all(self) -> list[tuple[str, Buffer]]:
        values = [(group, buffer) for (_, _, group), buffer in self._values.items()]
        return values + [(group, buffer) for (group, _, _), buffer in self._gradients.items()]

    def add(self, edge: DataEdge) -> None:
        src, dst = self._nodes[edge.src], self._nodes[edge.dst]
        if isinstance(src, Send):
            return
        for name in edge.values:
            if name.startswith("gradient "):
                self._add_gradient(src, dst, name)
            elif name.startswith("weight residuals "):
                self._add_weight_residuals(src, dst, name)
            elif isinstance(src, Compute | Recv | Collective):
                self._add_value(src, dst, name)

    def _value_bytes(self, name: str, group: str) -> int:
        found = self._bytes.get((name, group))
        if found is None:
            found = self._bytes[name, group] = self._sizes.value_bytes(name, group)
        return found

    def _add_value(self, src: Node, dst: Node, name: str) -> None:
        group = (dst if isinstance(src, Collective) else src).group or ""
        nbytes = self._value_bytes(name, group)
        if not nbytes:
            return
        end = self._interval(dst.id)[1]
        buffer = self._values.get((src.id, name, group))
        if buffer is None:
            received = isinstance(src, Recv)
            start = self._interval(src.match if received else src.id)[0]
            kind = TRANSFERS if received else _kind(name)
            buffer = self._values[src.id, name, group] = [start, end, nbytes, kind]
        elif end > buffer[1]:
            buffer[1] = end
        if isinstance(dst, Send) and buffer[3] == ACTIVATIONS:
            buffer[3] = TRANSFERS

    def _add_weight_residuals(self, src: Node, dst: Node, name: str) -> None:
        """What BI computes for BW lives from its start; what BI reads and leaves is a residual until its end."""
        group, (start, end) = src.group or "", self._interval(src.id)
        kept, crossing = self._sizes.weight_residuals(name.removeprefix("weight residuals "), group)
        last = self._interval(dst.id)[1]
        self._values[src.id, f"kept {name}", group] = [end, last, kept, ACTIVATIONS]
        self._values[src.id, name, group] = [start, last, crossing, ACTIVATIONS]

    def _add_gradient(self, src: Node, dst: Node, name: str) -> None:
        bucket = self._buckets.get(name.partition(" ")[2])
        if bucket is None:
            return
        scattered = isinstance(src, Collective) and src.kind == "reduce_scatter"
        each = src.id if isinstance(dst, Collective) and dst.id.MB is not None else None
        start, end = self._interval(src.id)[0], self._interval(dst.id)[1]
        if scattered and src.id.MB is not None:
            start = 0.0  # added to after each span, and there from step to step
        if isinstance(dst, Update):
            end = self._last_updates[dst.group or ""]
        holder = src.group if isinstance(src, Compute) else dst.group
        for group in members_of(holder or "", self._groups):
            key = (group, name, "shard" if scattered else each)
            buffer = self._gradients.get(key)
            if buffer is None:
                size = self._sizes.scattered_bytes if scattered else self._sizes.bucket_bytes
                self._gradients[key] = [start, end, size(bucket, group), GRADIENTS]
            else:
                buffer[0], buffer[1] = min(buffer[0], start), max(buffer[1], end)


def _last_updates(dag: Dag, interval: Callable[[NodeId], Interval]) -> dict[str, float]:
    """When the last round of updates of each group ends; gradients live until then."""
    ends: dict[str, float] = {}
    for node in dag.nodes.values():
        if isinstance(node, Update):
            ends[node.group or ""] = max(ends.get(node.group or "", 0.0), interval(node.id)[1])
    return ends


def _kind(name: str) -> int:
    prefix = name.partition(" ")[0]
    return {"parameters": PARAMETERS, "state": OPTIMIZER}.get(prefix, ACTIVATIONS)


def _resident_bytes(dag: Dag, sizes: Sizes) -> dict[str, list[int]]:
    """Bytes by kind that one device of each group keeps between steps."""
    owned: dict[str, dict[str, None]] = defaultdict(dict)
    updated: dict[str, dict[str, None]] = defaultdict(dict)
    for node in dag.nodes.values():
        if isinstance(node, Compute):
            owned[node.group or ""].update(dict.fromkeys(dag.ops[node.id.op].reads))
        elif isinstance(node, Update):
            updated[node.group or ""].update(dict.fromkeys(node.buckets))
    resident: dict[str, list[int]] = {}
    for group in compute_groups(dag):
        counts = resident[group] = [0] * len(MEMORY_KINDS)
        counts[PARAMETERS] = sum(
            sizes.parameter_bytes(dag.buckets[name], group) for name in owned[group] if name in dag.buckets
        )
        counts[OPTIMIZER] = sum(sizes.optimizer_bytes(dag.buckets[name], group) for name in updated[group])
    return resident


def _timeline(changes: list[tuple[float, int, int]], resident: list[int]) -> GroupMemory:
    """Adds up the changes; at one instant what is freed goes first."""
    changes.sort()
    counts = list(resident)
    steps: list[MemoryStep] = [MemoryStep(0.0, *counts)]
    position = 0
    while position < len(changes):
        time = changes[position][0]
        while position < len(changes) and changes[position][0] == time:
            _, nbytes, kind = changes[position]
            counts[kind] += nbytes
            position += 1
        step = MemoryStep(time, *counts)
        if time == steps[-1].time:
            steps[-1] = step
        elif step[1:] != steps[-1][1:]:
            steps.append(step)
    return GroupMemory(steps=tuple(steps))
