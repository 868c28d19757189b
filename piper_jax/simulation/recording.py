"""From the engine's times to the report: spans, busy time, bubbles, the critical path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Collective, Compute, Node, Recv, Send, Update
from piper_jax.simulation.engine import Times
from piper_jax.simulation.program import Program
from piper_jax.simulation.report import Span
from piper_jax.simulation.sizes import Sizes


def kind_of(node: Node) -> str:
    """How spans name the class of a node."""
    match node:
        case Compute():
            return "compute"
        case Update():
            return "update"
        case Send():
            return "send"
        case Recv():
            return "recv"
        case Collective():
            return node.kind


class Recorder:
    """Turns slots into spans."""

    def __init__(self, dag: Dag, program: Program, times: Times):
        self._program, self._times = program, times
        self._index = {node.id: number for number, node in enumerate(program.nodes) if isinstance(node, Send)}
        self._nbytes = _node_bytes(dag)

    def spans(self) -> list[Span]:
        """Everything that takes time, by start, then by group."""
        found = [span for slot in range(len(self._program.slots)) for span in self.spans_of_slot(slot)]
        found.sort(key=lambda span: (span.start, span.group))
        return found

    def critical_path(self) -> list[Span]:
        """The spans from the start of the step to its end of which each lets the next one start."""
        ends = self._times.slot_end
        slot = max(range(len(ends)), key=ends.__getitem__, default=-1)
        path: list[Span] = []
        while slot >= 0:
            path.extend(reversed(self.spans_of_slot(slot)))
            slot = self._times.cause[slot]
        return path[::-1]

    def spans_of_slot(self, slot: int) -> list[Span]:
        """One span for the program of a slot, and one for each communication in it."""
        members = self._program.slots[slot]
        if len(members) == 1:
            return self._single(slot, members[0])
        return self._several(slot, members) if self._times.slot_end[slot] > self._times.slot_start[slot] else []

    def _single(self, slot: int, number: int) -> list[Span]:
        program, times = self._program, self._times
        node = program.nodes[number]
        ready, start, end = times.slot_start[slot], times.node_start[number], times.node_end[number]
        if isinstance(node, Recv):
            ready = max((times.slot_end[before] for before in program.previous[slot]), default=0.0)
            send = self._index.get(node.match)
            start = max(ready, times.node_start[send] if send is not None else ready)
        if isinstance(node, Recv) and node.stream == "recv":
            ready = start
        if end <= ready:
            return []
        kind, nbytes = kind_of(node), self._nbytes(node)
        return [
            Span(group, node.stream, kind, (node.id,), start, end, start - ready, nbytes)
            for group in program.slot_groups[slot]
        ]

    def _several(self, slot: int, members: tuple[int, ...]) -> list[Span]:
        """Computations of one stream are one span; communication on the compute stream moves to one of its own."""
        program, times = self._program, self._times
        parts: list[tuple[str, list[Node], float, float]] = []
        streams: dict[str, list[Node]] = defaultdict(list)
        for number in members:
            node = program.nodes[number]
            if isinstance(node, Compute | Update):
                streams[node.stream].append(node)
            elif times.node_end[number] > times.node_start[number]:
                stream = kind_of(node) if node.stream == "compute" else node.stream
                parts.append((stream, [node], times.node_start[number], times.node_end[number]))
        whole = times.slot_start[slot], times.slot_end[slot]
        parts += [(stream, nodes, *whole) for stream, nodes in streams.items()]
        return [
            Span(group, stream, kind_of(nodes[0]), tuple(node.id for node in nodes), start, end, 0.0, nbytes)
            for stream, nodes, start, end in parts
            for nbytes in (sum(map(self._nbytes, nodes)),)
            for group in program.slot_groups[slot]
        ]


def _node_bytes(dag: Dag) -> Callable[[Node], int]:
    """Bytes on one device that a node moves, or that a forward keeps for its backward."""
    sizes = Sizes(dag)
    table: dict[tuple[object, ...], int] = {}

    def nbytes(node: Node) -> int:
        if isinstance(node, Update) or (isinstance(node, Compute) and node.id.PASS != "F"):
            return 0
        group = node.group or ""
        names = (f"residuals {node.id.op}",) if isinstance(node, Compute) else node.values
        key = (group, names)
        if key not in table:
            table[key] = sum(sizes.value_bytes(name, group) for name in names)
        return table[key]

    return nbytes


def busy_times(program: Program, times: Times, spans: Iterable[Span]) -> dict[str, dict[str, float]]:
    """Time in use of each stream of each group: computations by their own durations, the rest by their spans."""
    busy: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for number, node in enumerate(program.nodes):
        if isinstance(node, Compute | Update):
            busy[node.group or ""][node.stream] += times.node_end[number] - times.node_start[number]
    for span in spans:
        if span.kind not in ("compute", "update"):
            busy[span.group][span.stream] += span.end - span.start
    return {group: {stream: time for stream, time in streams.items() if time} for group, streams in busy.items()}


def compute_intervals(program: Program, times: Times) -> dict[str, list[tuple[float, float]]]:
    """When each group computes or updates."""
    intervals: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for number, node in enumerate(program.nodes):
        if isinstance(node, Compute | Update) and times.node_end[number] > times.node_start[number]:
            intervals[node.group or ""].append((times.node_start[number], times.node_end[number]))
    return intervals
