"""ZeRO-3: parameters that are sharded between their uses are gathered before them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, DataEdge, Node, OrderEdge
from piper_jax.ir.ownership import Ownership, ownerships
from piper_jax.ir.reading import PASSES, leaves_read
from piper_jax.planning.joining import compute_slots, with_joined
from piper_jax.planning.updates import bundles, collective

Reader = tuple[str, str | None]
"""An operation and a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """One all_gather, the nodes that use its result, and the slot of its group that it overlaps (or None)."""

    node: Collective
    users: tuple[NodeId, ...]
    joins: int | None
    after: NodeId | None = None


def with_gathers(dag: Dag) -> Dag:
    """Adds one all_gather before each run of uses of buckets whose parameters are sharded.

    On their one owner, uses that are at most ``gather_distance`` slots apart share a gather, which overlaps the slot
    that many before the first of them; the whole copy is freed after the last. Neighbouring buckets with the same uses
    share it up to their ``bucket_bytes``. Buckets with several owners are gathered on all of them together, once per
    step. Groups with gathers get all their slots named. ::

        g0: F[PP=0,MB=0] | F[PP=7,MB=0] | B[PP=7,MB=0] | B[PP=0,MB=0]
        -->  all_gather parameters a | F[PP=0,MB=0] with all_gather b | F[PP=7] | B[PP=7] with all_gather a | B[PP=0]
    """
    sharded = [o for o in ownerships(dag).values() if o.replication.shard_params and o.num_copies > 1]
    readers = {o.bucket: _readers(dag, o.bucket) for o in sharded}
    sharded = [o for o in sharded if readers[o.bucket]]
    if not sharded:
        return dag
    orders = compute_slots(dag)
    gathers = [
        gather
        for bundle in bundles(sharded, dag, lambda o: {op for op, _ in readers[o.bucket]})
        for gather in _gathers(dag, bundle, set[Reader]().union(*(readers[o.bucket] for o in bundle)), orders)
    ]
    joined: dict[tuple[str, int], list[NodeId]] = {}
    for gather in gathers:
        if gather.joins is not None:
            joined.setdefault((gather.node.group or "", gather.joins), []).append(gather.node.id)
    pinned = {o.owners[0] for o in sharded if len(o.owners) == 1}
    return _inserted(with_joined(dag, orders, joined, pinned), gathers)


def _readers(dag: Dag, bucket: str) -> set[Reader]:
    """Operations and passes that read a bucket; a backward often needs none of it, as on the first stage."""
    known = dag.buckets[bucket]
    reading = [op for op in dag.ops.values() if bucket in op.reads]
    return {(op.name, PASS) for op in reading for PASS in PASSES if leaves_read(op, PASS, known)}


def _reads(dag: Dag, node: NodeId, readers: Collection[Reader]) -> bool:
    return (node.op, node.PASS) in readers and isinstance(dag.nodes[node], Compute)


def _gathers(
    dag: Dag, bundle: Sequence[Ownership], readers: Collection[Reader], orders: Mapping[str, Sequence[Slot]]
) -> list[Gather]:
    first = bundle[0]
    stream, distance = first.replication.gather_stream, first.replication.gather_distance
    first_owner, *others = first.owners
    if others:
        users = [n for owner in first.owners for slot in orders[owner] for n in slot.nodes if _reads(dag, n, readers)]
        return [
            Gather(node=collective("all_gather", "parameters", bundle, stream, "F"), users=tuple(users), joins=None)
        ]
    order = orders[first_owner]
    runs: list[list[int]] = []
    for i, slot in enumerate(order):
        if any(_reads(dag, node, readers) for node in slot.nodes):
            if runs and i - max(runs[-1]) <= max(distance, 1):
                runs[-1].append(i)
            else:
                runs.append([i])
    return [_gather(dag, bundle, readers, order, run) for run in runs]


def _gather(
    dag: Dag, bundle: Sequence[Ownership], readers: Collection[Reader], order: Sequence[Slot], run: Sequence[int]
) -> Gather:
    replication = bundle[0].replication
    users = tuple(node for i in run for node in order[i].nodes if _reads(dag, node, readers))
    node = collective("all_gather", "parameters", bundle, replication.gather_stream, "F")
    first = users[0]
    what = f"{node.id.op} for {first.op}" if len({op for op, _ in readers}) > 1 else node.id.op
    name = NodeId(what, first.PASS, first.PP, first.EP, first.MB)
    early = run[0] - replication.gather_distance
    after = order[run[0] - 1].nodes[-1] if early == run[0] and early > 0 else None
    joins = early if replication.gather_distance > 0 and early >= 0 else None
    return Gather(node=replace(node, id=name), users=users, joins=joins, after=after)


def _inserted(dag: Dag, gathers: Sequence[Gather]) -> Dag:
    before: dict[NodeId, list[Collective]] = {}
    data, order = list(dag.data), list(dag.order)
    for gather in gathers:
        before.setdefault(gather.users[0], []).append(gather.node)
        data += (DataEdge(gather.node.id, user, gather.node.values) for user in gather.users)
        if gather.after is not None:
            order.append(OrderEdge(gather.after, gather.node.id, "gather distance"))
    nodes: dict[NodeId, Node] = {}
    for name, node in dag.nodes.items():
        nodes.update((gather.id, gather) for gather in before.get(name, ()))
        nodes[name] = node
    return replace(dag, nodes=nodes, data=tuple(data), order=tuple(order))
