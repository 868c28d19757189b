"""The arrays that the programs of a step hand to each other, and from which program to which a device holds them.

These are the registers of the runtime, found from the plan alone. What one program makes and uses up never becomes an
array; what it reads is there until it ends.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.device_groups import members_of
from piper_jax.ir.fusion import moves_state, when_of
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, DataEdge, Recv, Send, Update
from piper_jax.ir.ownership import Ownership, ownerships
from piper_jax.ir.reading import leaves_read
from piper_jax.simulation.report import MEMORY_KINDS
from piper_jax.simulation.sizes import Sizes
from piper_jax.simulation.topology import compute_groups

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TRANSFERS, BATCH = range(len(MEMORY_KINDS))
INSIDE = len(MEMORY_KINDS)
GIVEN = -1
REDUCTIONS = ("all_reduce", "reduce_scatter")


class Register(NamedTuple):
    """Bytes of ``kind`` on one device of ``group``, from the program at ``start`` to that at ``end``, both included.

    ``INSIDE`` is the kind of what one program makes and uses up.
    """

    group: str
    start: int
    end: int
    nbytes: int
    kind: int


class Registers:
    """The registers of a completed DAG.

    Args:
      order: what it dispatches. What is there before the step starts at ``GIVEN``; what stays ends at its length.
    """

    def __init__(self, dag: Dag, order: Sequence[Slot]):
        self._dag, self._sizes, self._end = dag, Sizes(dag), len(order)
        self._updates = _updates(dag, order)
        self._position = _positions(dag, order, self._updates)
        self._whole_until: dict[tuple[str, str], int] = {}
        self._edges: dict[NodeId, list[DataEdge]] = defaultdict(list)
        self._into: dict[NodeId, list[DataEdge]] = defaultdict(list)
        for edge in dag.data:
            self._edges[edge.src].append(edge)
            if moves_state(dag.nodes[edge.dst]):
                self._into[edge.dst].append(edge)

    def all(self) -> Iterator[Register]:
        """Every register."""
        gathers: list[Collective] = []
        for node in self._dag.nodes.values():
            if isinstance(node, Compute | Recv) or (isinstance(node, Collective) and node.kind == "all_to_all"):
                yield from self._values(node)
            elif isinstance(node, Collective) and node.kind == "all_gather" and moves_state(node):
                gathers.append(node)
        for node in sorted(gathers, key=lambda node: self._position[node.id]):
            yield from self._gathered(node)
        yield from self._gradients()
        for group in compute_groups(self._dag):
            yield from self._resident(group)

    # -- activations ---------------------------------------------------------------------------------------
    def _values(self, node: Compute | Recv | Collective) -> Iterator[Register]:
        """What a node gives: until its last use, and on where a backward reads it again."""
        group, start = node.group or "", self._position[node.id]
        used: dict[str, int] = {}
        kept: dict[str, int] = {}
        moved = set[str]()
        room = self._room(node, group)
        for edge in self._edges[node.id]:
            end = self._position[edge.dst]
            moved.update(edge.values if isinstance(node, Recv) or isinstance(self._dag.nodes[edge.dst], Send) else ())
            for name in edge.values:
                word = name.partition(" ")[0]
                if word in ("residuals", "weight"):
                    yield from self._residuals(group, edge, word)
                elif word not in ("gradient", "carried"):
                    used[name] = max(used.get(name, GIVEN), end)
                    kept[name] = max(kept.get(name, GIVEN), self._read_again(edge.dst, name))
        for name, last in used.items():
            nbytes = math.ceil(self._sizes.value_bytes(name, group) * room)
            kind = TRANSFERS if name in moved else ACTIVATIONS
            if kept[name] <= last:
                yield _made(group, start, last, nbytes, kind)
            else:
                yield Register(group, start, last, nbytes, kind)
                yield Register(group, last + 1, kept[name], nbytes, ACTIVATIONS)

    def _room(self, node: Compute | Recv | Collective, group: str) -> float:
        """How much more than its share there is of what a node gives: of rows that are with their experts."""
        if isinstance(node, Recv) or (isinstance(node, Collective) and node.way != "enter"):
            return 1
        return self._sizes.room((node.around or "") if isinstance(node, Collective) else node.id.op, group)

    def _residuals(self, group: str, edge: DataEdge, word: str) -> Iterator[Register]:
        until_inputs, until_weights, crossing = self._sizes.residual_parts(edge.src.op, group)
        start, end = self._position[edge.src], self._position[edge.dst]
        if word == "weight":
            yield _made(group, start, end, crossing, ACTIVATIONS)
            return
        yield _made(group, start, end, until_inputs, ACTIVATIONS)
        last = self._position.get(edge.dst._replace(PASS="BW"), end)
        yield _made(group, start, last, until_weights, ACTIVATIONS)

    def _read_again(self, node: NodeId, name: str) -> int:
        """The last half of a backward that reads a value which ``node``, of the same operation, reads."""
        op = self._dag.ops.get(node.op)
        if op is None or op.input_reads is None or op.weight_reads is None:
            return GIVEN
        halves = {"BI": name in op.input_reads.values, "BW": name in op.weight_reads.values}
        reads = [*(half for half, found in halves.items() if found), *(["B"] if any(halves.values()) else [])]
        return max((self._position.get(node._replace(PASS=PASS), GIVEN) for PASS in reads), default=GIVEN)

    # -- state ---------------------------------------------------------------------------------------------
    def _resident(self, group: str) -> Iterator[Register]:
        """Parameters and optimizer state as they are kept between steps; the batch, which is there for all of one."""
        nodes = [node for node in self._dag.nodes.values() if node.group == group]
        ops = {node.id.op for node in nodes if isinstance(node, Compute)}
        reads = Counter(bucket for op in ops for bucket in self._dag.ops[op].reads)
        updated = {bucket for node in nodes if isinstance(node, Update) for bucket in node.buckets}
        buckets = self._dag.buckets
        held = sum(self._sizes.parameter_bytes(buckets[name], group) for name in reads if name in buckets)
        state = sum(self._sizes.optimizer_bytes(buckets[name], group) for name in updated)
        state += self._dag.common_optimizer_bytes if updated else 0
        yield Register(group, GIVEN, self._end, held, PARAMETERS)
        yield Register(group, GIVEN, self._end, state, OPTIMIZER)
        left = sum(self._sizes.carried_bytes(buckets[name], count) for name, count in reads.items() if name in buckets)
        yield Register(group, 0, self._end, left, PARAMETERS)
        leaves = {path for op in ops for path in self._dag.ops[op].batch_inputs}
        batch = sum(self._sizes.batch_bytes(path, group) for path in leaves)
        yield Register(group, GIVEN, self._end - 1, batch, BATCH)

    def _gathered(self, node: Collective) -> Iterator[Register]:
        """Whole parameters until the last pass that reads them, leaf by leaf; whole state until the last update."""
        start, users = self._position[node.id], [edge.dst for edge in self._edges[node.id]]
        for group in members_of(node.group or "", self._dag.groups):
            last = self._updates.get(group, (GIVEN, GIVEN))[1]
            for word, bucket in (value.split(" ", 1) for value in node.values):
                known = self._dag.buckets[bucket]
                if when_of(self._dag, node) == "after":
                    shard = self._sizes.scattered_bytes(known, group)
                    yield Register(group, last, start, shard if start > last else 0, PARAMETERS)
                elif word == "state":
                    yield _made(group, start, last, self._sizes.whole_optimizer_bytes(known, group), OPTIMIZER)
                elif word == "parameters" and any(isinstance(self._dag.nodes[user], Update) for user in users):
                    yield _made(group, start, last, self._sizes.bucket_bytes(known, group), PARAMETERS)
                elif word == "parameters":
                    own = [user for user in users if self._dag.nodes[user].group == group]
                    yield from self._leaves(group, start, own, bucket)

    def _leaves(self, group: str, start: int, users: Iterable[NodeId], bucket: str) -> Iterator[Register]:
        known, ends = self._dag.buckets[bucket], dict[str, int]()
        for user in users:
            for leaf in leaves_read(self._dag.ops[user.op], user.PASS, known):
                ends[leaf.path] = max(ends.get(leaf.path, GIVEN), self._position[user])
        for leaf in known.leaves:
            if leaf.path in ends and leaf.kind == "trainable":
                begun = max(start, self._whole_until.get((group, leaf.path), GIVEN) + 1)  # gathered anew in its place
                self._whole_until[group, leaf.path] = max(begun, ends[leaf.path])
                nbytes = self._sizes.leaf_bytes(known, leaf, group)
                kind = INSIDE if start == ends[leaf.path] else PARAMETERS
                yield Register(group, begun, ends[leaf.path], nbytes, kind)

    # -- gradients -----------------------------------------------------------------------------------------
    def _gradients(self) -> Iterator[Register]:
        """Accumulators, which are there from step to step, and what reductions make of them before the update ends."""
        touching: dict[str, list[Collective]] = defaultdict(list)
        for node in self._dag.nodes.values():
            for value in node.values if isinstance(node, Collective) else ():
                if value.startswith("gradient ") and isinstance(node, Collective):
                    touching[value.removeprefix("gradient ")].append(node)
        for owned in ownerships(self._dag).values():
            for group in owned.owners:
                if group in self._updates:
                    yield from self._gradients_of(owned, group, touching[owned.bucket])

    def _gradients_of(self, owned: Ownership, group: str, touching: Collection[Collective]) -> Iterator[Register]:
        bucket, (first, last) = self._dag.buckets[owned.bucket], self._updates[group]
        whole, shard = self._sizes.accumulator_bytes(bucket, group)
        reductions = [node.id for node in touching if node.kind in REDUCTIONS]
        gathered = [self._position[node.id] for node in touching if node.kind == "all_gather"]
        scattered = owned.num_shards > 1 and bool(reductions)
        kept, made = (whole, max((self._position[node] for node in reductions), default=first))
        if owned.span is not None:
            kept, made = shard, first
            for node in reductions:
                begun = min(self._position[e.src] for e in self._into[node] if f"gradient {owned.bucket}" in e.values)
                yield _made(group, begun, self._position[node], whole, GRADIENTS)
        reduced = (self._sizes.scattered_bytes if scattered else self._sizes.bucket_bytes)(bucket, group)
        forms = {GIVEN: kept, made: reduced, **dict.fromkeys(gathered, self._sizes.bucket_bytes(bucket, group))}
        yield from self._in_turn(group, [*((at, n) for at, n in forms.items() if at < last), (last, kept)])

    def _in_turn(self, group: str, forms: Sequence[tuple[int, int]]) -> Iterator[Register]:
        """Gradients in one form after another: where the size is the same, a program overwrites the one before."""
        begun, held = forms[0]
        for at, nbytes in forms[1:]:
            if nbytes != held:
                yield Register(group, begun, at, held, GRADIENTS)
                begun, held = at, nbytes
        yield Register(group, begun, self._end, held, GRADIENTS)


def _made(group: str, start: int, end: int, nbytes: int, kind: int) -> Register:
    """What the program at ``start`` makes and that at ``end`` uses last."""
    return Register(group, start, end, nbytes, INSIDE if start == end else kind)


def _updates(dag: Dag, order: Sequence[Slot]) -> dict[str, tuple[int, int]]:
    """Positions of the first and the last round of updates of each group."""
    found: dict[str, tuple[int, int]] = {}
    for position, slot in enumerate(order):
        if isinstance(dag.nodes[slot.nodes[0]], Update):
            first, _ = found.get(slot.group, (position, position))
            found[slot.group] = first, position
    return found


def _positions(dag: Dag, order: Sequence[Slot], updates: Mapping[str, tuple[int, int]]) -> dict[NodeId, int]:
    """Where each node runs: a receive with its send, what is part of an update with that."""
    position = {node: i for i, slot in enumerate(order) for node in slot.nodes}
    for name, node in dag.nodes.items():
        if isinstance(node, Recv):
            position[name] = position[node.match]
        elif isinstance(node, Collective) and moves_state(node) and (found := updates.get(node.group or "")):
            when = when_of(dag, node)
            if when != "slot":
                position[name] = found[0 if when == "before" else 1]
    return position
