"""Gradient reductions, optimizer updates and what follows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from piper_jax.ir.dag import Coupling, Dag
from piper_jax.ir.device_groups import joint_group
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, CollectiveKind, DataEdge, DeviceGroup, Node, OrderEdge, Update, Value
from piper_jax.ir.ownership import Ownership, ownerships


@dataclass(slots=True)
class Additions:
    """What one completion step adds to a DAG. Lives inside one call."""

    nodes: dict[NodeId, Node] = field(default_factory=dict)
    data: list[DataEdge] = field(default_factory=list)
    order: list[OrderEdge] = field(default_factory=list)
    groups: dict[str, DeviceGroup] = field(default_factory=dict)


def with_updates(dag: Dag) -> Dag:
    """Replaces the traced updates by one per owner group and round, and adds the reductions that they need.

    A bucket whose copies lie on several devices or groups gets one all_reduce per step over all of them; under ZeRO a
    reduce_scatter, and an all_gather of the parameters after the update unless they stay sharded. What the optimizer
    does not update element by element is gathered before the update instead, which every device then computes whole,
    keeping its shard. ::

        B[MB=0], B[MB=1] --> U update embed
        -->  B[MB=0], B[MB=1] --> all_reduce gradient embed (on g0+g3) --> U update g0, U update g3
    """
    owned = ownerships(dag)
    traced = {name for name, node in dag.nodes.items() if isinstance(node, Update)}
    sources: dict[str, list[NodeId]] = {bucket: [] for bucket in owned}
    for edge in dag.data:
        if edge.dst in traced:
            for bucket in (v.removeprefix("gradient ") for v in edge.values if v.startswith("gradient ")):
                if bucket in sources:
                    sources[bucket].append(edge.src)
    reduced = (o for b, o in owned.items() if o.num_shards > 1 or (o.num_copies > 1 and sources[b]))
    new = Additions(groups={o.group.name: o.group for o in reduced})
    rounds = _rounds(dag, owned)
    _reduce(dag, new, owned, sources)
    _update(dag, new, owned, rounds)
    _couple(dag, new, owned, rounds)
    _gather_updated(dag, new, owned, rounds)
    nodes = {name: node for name, node in dag.nodes.items() if name not in traced}
    data = [edge for edge in dag.data if edge.dst not in traced and edge.src not in traced]
    return replace(
        dag,
        nodes={**nodes, **new.nodes},
        data=(*data, *new.data),
        order=(*_kept_order(dag, traced, rounds), *new.order),
        groups={**dag.groups, **new.groups},
        values={**_state_values(dag, owned), **dag.values},
    )


def _kept_order(dag: Dag, traced: Collection[NodeId], rounds: Mapping[str, int]) -> Iterator[OrderEdge]:
    """The order edges; those into traced updates (read before update) into the update of the reader's own group."""
    for edge in dag.order:
        reader = dag.nodes[edge.src].group or ""
        if edge.dst not in traced and edge.src not in traced:
            yield edge
        elif edge.dst in traced and reader in rounds:
            yield OrderEdge(edge.src, update_id(reader, 0), edge.reason)


def bundles(
    owned: Iterable[Ownership], dag: Dag, also: Callable[[Ownership], object] = lambda o: None
) -> list[list[Ownership]]:
    """Neighbouring buckets of equal owners, dtype, replication and ``also``, joined up to their ``bucket_bytes``."""
    joined: list[list[Ownership]] = []
    sizes: list[int] = []
    for o in owned:
        nbytes = trainable_bytes(dag, o.bucket)
        limit = o.replication.bucket_bytes
        last = joined[-1][-1] if joined else None
        alike = last is not None and (_kept(last, dag), also(last)) == (_kept(o, dag), also(o))
        if alike and limit is not None and sizes[-1] + nbytes <= limit:
            joined[-1].append(o)
            sizes[-1] += nbytes
        else:
            joined.append([o])
            sizes.append(nbytes)
    return joined


def _kept(o: Ownership, dag: Dag) -> tuple[object, ...]:
    dtypes = {leaf.gradient_dtype for leaf in dag.buckets[o.bucket].leaves if leaf.kind == "trainable"}
    return o.owners, o.axes, o.num_parts, o.replication, o.elementwise, dtypes


def trainable_bytes(dag: Dag, bucket: str) -> int:
    """Bytes of the trainable leaves of a bucket."""
    return sum(leaf.nbytes for leaf in dag.buckets[bucket].leaves if leaf.kind == "trainable")


def bundle_name(bundle: Sequence[Ownership]) -> str:
    """The bucket's name, or that of the first of several with their number."""
    return bundle[0].bucket if len(bundle) == 1 else f"{bundle[0].bucket} and {len(bundle) - 1} more"


def collective(
    kind: CollectiveKind, what: str, bundle: Sequence[Ownership], stream: str, PASS: str, MB: int | None = None
) -> Collective:
    """A collective on the ``gradient`` or ``parameters`` of a bundle of buckets."""
    first = bundle[0]
    return Collective(
        id=NodeId(f"{kind} {what} {bundle_name(bundle)}", PASS, MB=MB),
        group=first.group.name,
        stream=stream,
        kind=kind,
        axes=first.axes,
        values=tuple(f"{what} {o.bucket}" for o in bundle),
        bucket=first.bucket if len(bundle) == 1 else None,
    )


def update_id(group: str, round: int) -> NodeId:
    """``update g0``, or ``update g0 round 1``."""
    return NodeId(f"update {group}" + (f" round {round}" if round else ""), "U")


def _reduce(dag: Dag, new: Additions, owned: Mapping[str, Ownership], sources: Mapping[str, Sequence[NodeId]]) -> None:
    for bundle in bundles((o for o in owned.values() if sources[o.bucket]), dag):
        first = bundle[0]
        if first.num_copies == 1:
            _link(dag, new, bundle, sources)
            continue
        kind = "reduce_scatter" if first.num_shards > 1 else "all_reduce"
        parts: dict[int | None, dict[str, list[NodeId]]] = {}
        for o in bundle:
            for src in sources[o.bucket]:
                part = parts.setdefault(None if o.span is None else (src.MB or 0) // o.span, {})
                part.setdefault(o.bucket, []).append(src)
        reductions: list[NodeId] = []
        for span, inputs in parts.items():
            last = None if span is None else max(src.MB or 0 for found in inputs.values() for src in found)
            node = collective(kind, "gradient", bundle, first.replication.reduce_stream, "B", last)
            new.nodes[node.id] = node
            reductions.append(node.id)
            for bucket, nodes in inputs.items():
                new.data += (DataEdge(src, node.id, (f"gradient {bucket}",)) for src in nodes)
            new.data += (DataEdge(node.id, update_id(owner, 0), node.values) for owner in first.owners)
        if first.num_shards > 1 and not first.elementwise:
            _gather_for_update(new, bundle, reductions)
    for bundle in bundles((o for o in owned.values() if not sources[o.bucket]), dag):
        if bundle[0].num_shards > 1 and not bundle[0].elementwise:
            _gather_for_update(new, bundle, ())


def _gather_for_update(new: Additions, bundle: Sequence[Ownership], reductions: Sequence[NodeId]) -> None:
    """Everything of these buckets that is in shards becomes whole for their update; what has no gradient gets none."""
    first = bundle[0]
    what = "gradient" if reductions else "state"
    node = collective("all_gather", what, bundle, first.replication.gather_stream, "B")
    kinds = (*(("gradient",) if reductions else ()), "state")
    kinds = (*kinds, "parameters") if first.replication.shard_params else kinds
    node = replace(node, values=tuple(f"{kind} {o.bucket}" for o in bundle for kind in kinds))
    new.nodes[node.id] = node
    new.data += (DataEdge(src, node.id, tuple(f"gradient {o.bucket}" for o in bundle)) for src in reductions)
    new.data += (DataEdge(node.id, update_id(owner, 0), node.values) for owner in first.owners)


def _link(dag: Dag, new: Additions, bundle: Sequence[Ownership], sources: Mapping[str, Sequence[NodeId]]) -> None:
    """Gradients go straight from backward to the update of its group."""
    for o in bundle:
        for src in sources[o.bucket]:
            new.data.append(DataEdge(src, update_id(dag.nodes[src].group or "", 0), (f"gradient {o.bucket}",)))


def _rounds(dag: Dag, owned: Mapping[str, Ownership]) -> dict[str, int]:
    """How many rounds of updates each owner group has: what one group holds whole needs no exchange."""
    rounds = {owner: 1 for owner in dag.groups if any(owner in o.owners for o in owned.values())}
    for coupling in dag.couplings:
        if _is_exchanged(dag, owned, coupling):
            for owner in _coupled(owned, coupling.buckets):
                rounds[owner] = max(rounds[owner], coupling.round + 2)
    return rounds


def _is_exchanged(dag: Dag, owned: Mapping[str, Ownership], coupling: Coupling) -> bool:
    """Whether the coupled buckets lie on several groups, or in shards on several devices."""
    inside = [owned[b] for b in coupling.buckets if b in owned]
    return len(_coupled(owned, coupling.buckets)) > 1 or any(o.is_divided for o in inside)


def _coupled(owned: Mapping[str, Ownership], buckets: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(owner for b in buckets if b in owned for owner in owned[b].owners))


def _update(dag: Dag, new: Additions, owned: Mapping[str, Ownership], rounds: Mapping[str, int]) -> None:
    for owner, count in rounds.items():
        buckets = tuple(bucket for bucket, o in owned.items() if owner in o.owners)
        for number in range(count):
            name = update_id(owner, number)
            new.nodes[name] = Update(id=name, group=owner, buckets=buckets, round=number)
            if number:
                new.order.append(OrderEdge(update_id(owner, number - 1), name, "round"))


def _couple(dag: Dag, new: Additions, owned: Mapping[str, Ownership], rounds: Mapping[str, int]) -> None:
    """One all_gather of scalars between rounds, where groups or shards are mixed."""
    for coupling in dag.couplings:
        value = f"update scalars {coupling.round}"
        coupled = set(_coupled(owned, coupling.buckets))
        owners = [owner for owner in rounds if owner in coupled]
        if not _is_exchanged(dag, owned, coupling):
            continue
        group = joint_group([dag.groups[owner] for owner in owners])
        befores = [update_id(owner, coupling.round) for owner in owners]
        afters = [update_id(owner, coupling.round + 1) for owner in owners]
        node = Collective(id=NodeId(f"all_gather {value}", "U"), group=group.name, kind="all_gather", values=(value,))
        new.groups.setdefault(group.name, group)
        new.nodes[node.id] = node
        new.data += (DataEdge(before, node.id, (value,)) for before in befores)
        new.data += (DataEdge(node.id, after, (value,)) for after in afters)


def _gather_updated(dag: Dag, new: Additions, owned: Mapping[str, Ownership], rounds: Mapping[str, int]) -> None:
    """ZeRO-1 and 2: every device gets the parameters that others updated."""
    for bundle in bundles(owned.values(), dag):
        first = bundle[0]
        if first.num_shards == 1 or first.replication.shard_params or not first.elementwise:
            continue
        node = collective("all_gather", "parameters", bundle, first.replication.gather_stream, "U")
        new.nodes[node.id] = node
        new.data += (DataEdge(update_id(owner, rounds[owner] - 1), node.id, node.values) for owner in first.owners)


def _state_values(dag: Dag, owned: Mapping[str, Ownership]) -> dict[str, Value]:
    values = {f"update scalars {c.round}": c.nbytes for c in dag.couplings}
    for bucket in owned:
        values[f"gradient {bucket}"] = values[f"parameters {bucket}"] = trainable_bytes(dag, bucket)
    return {name: Value(name=name, nbytes=nbytes) for name, nbytes in values.items()}
