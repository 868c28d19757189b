"""Rules about parameters, their gradients and their updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from piper_jax.errors import PlanError
from piper_jax.ir.dag import Dag
from piper_jax.ir.device_groups import REPLICA_AXES, axes_of, members_of
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, Node, Update
from piper_jax.ir.ownership import Ownership, owners_of, ownerships, shard_axes_of
from piper_jax.ir.reading import leaves_read
from piper_jax.ir.rules.base import Checked

REDUCTIONS = ("all_reduce", "reduce_scatter")


def missing_axes(checked: Checked) -> Iterator[PlanError]:
    """Mesh axes that a directive names and the group does not have."""
    dag = checked.dag
    for name, owners in owners_of(dag).items():
        replication = dag.buckets[name].replication
        wanted = set(replication.axes if replication else ()) - shard_axes_of(dag).get(name, frozenset())
        for group in (dag.groups[owner] for owner in owners):
            present = [axis for axis, _ in axes_of(group)]
            for axis in sorted(wanted.difference(present)):
                yield _no_axis(f"state {name} is replicated over {axis}", group.name, present)
    placed = {(name.op, node.group) for name, node in dag.nodes.items() if isinstance(node, Compute)}
    for op_name, owner in sorted((op, group or "") for op, group in placed if dag.ops[op].shard_axis):
        present = [axis for axis, _ in axes_of(dag.groups[owner])]
        if dag.ops[op_name].shard_axis not in present:
            yield _no_axis(f"{op_name} is sharded over {dag.ops[op_name].shard_axis}", owner, present)


def _no_axis(what: str, group: str, present: list[str]) -> PlanError:
    return PlanError(
        f"{what}, but {group} has only the axes {', '.join(present)}.",
        help="give the group this axis (size 1 is legal), or leave it out of the directive.",
    )


def undivided_tensors(checked: Checked) -> Iterator[PlanError]:
    """Parameters that the tensor axis of an owner cannot divide."""
    dag = checked.dag
    sharded = shard_axes_of(dag)
    for name, owners in owners_of(dag).items():
        for leaf in (leaf for leaf in dag.buckets[name].leaves if leaf.tensor_dim is not None):
            for group in (dag.groups[owner] for owner in owners):
                size, dim = dict(axes_of(group)).get("tensor", 1), leaf.tensor_dim or 0
                if leaf.shape[dim] % size:
                    yield PlanError(
                        f"{leaf.given_path} {list(leaf.given_shape)} has {leaf.shape[dim]} on dimension "
                        f"{leaf.given_dim(dim)}, which tensor={size} of {group.name} does not divide.",
                        help="use another degree or size, or let the directive leave this dimension out.",
                        bucket=name,
                    )
                elif size > 1 and dim == 0 and "expert" in sharded.get(name, ()):
                    yield PlanError(
                        f"{leaf.given_path} {list(leaf.given_shape)} is divided on dimension {leaf.given_dim(0)} "
                        "already, that of the experts.",
                        help="let the tensor axis divide another dimension.",
                        bucket=name,
                    )


def diverging_replicas(checked: Checked) -> Iterator[PlanError]:
    """Parameters whose copies would get different gradients."""
    dag = checked.dag
    sharded = shard_axes_of(dag)
    for name, owned in ownerships(dag).items():
        covered = {*owned.replication.axes, *sharded.get(name, ())}
        for group in (dag.groups[owner] for owner in owned.owners):
            for axis, size in axes_of(group):
                if size > 1 and axis in REPLICA_AXES and axis not in covered:
                    yield PlanError(
                        f"state {name} has {size} copies over {axis} on {group.name}; nothing reduces their gradients.",
                        help=f'call plan.replicate(where(), axes=("{axis}",)), or shard its operation over {axis}.',
                        bucket=name,
                    )


def incomplete_updates(checked: Checked) -> Iterator[PlanError]:
    """Parameters that an owner does not update once, or whose gradients do not all arrive."""
    dag = checked.dag
    updated: dict[tuple[str, str], int] = {}
    for node in dag.nodes.values():
        if isinstance(node, Update) and node.round == 0:
            for bucket in node.buckets:
                key = (bucket, node.group or "")
                updated[key] = updated.get(key, 0) + 1
    owned = ownerships(dag)
    for name, o in owned.items():
        for owner in o.owners:
            count = updated.get((name, owner), 0)
            if count != 1:
                yield PlanError(
                    f"state {name} is updated {count} times on {owner}.", help="every owner updates it once per step."
                )
    yield from _lost_gradients(dag)
    yield from _lost_rounds(dag)


def _lost_gradients(dag: Dag) -> Iterator[PlanError]:
    """Gradients that miss the reduction or update of their bucket, and reductions that an update does not wait for."""
    reduced = ownerships(dag)
    given: dict[str, dict[str, None]] = {}
    arriving: dict[NodeId, set[str]] = {}
    for edge in dag.data:
        if not isinstance(dag.nodes[edge.src], Compute):
            continue
        for bucket in (v.removeprefix("gradient ") for v in edge.values if v.startswith("gradient ")):
            if bucket in reduced:
                given.setdefault(edge.src.op, {})[bucket] = None
                if _is_end(dag.nodes[edge.dst], reduced[bucket]):
                    arriving.setdefault(edge.src, set()).add(bucket)
    for name, node in dag.nodes.items():
        if isinstance(node, Compute) and name.PASS in ("B", "BW") and name.op in given:
            for bucket in sorted(given[name.op].keys() - arriving.get(name, set())):
                end = "reduction" if reduced[bucket].num_copies > 1 else "update"
                yield PlanError(
                    f"the gradient of {bucket} from {name} does not reach its {end}.",
                    help="complete the plan again from its directives.",
                    bucket=bucket,
                )
    for name, node in dag.nodes.items():
        if isinstance(node, Collective) and node.kind in REDUCTIONS:
            owners = (reduced[v.removeprefix("gradient ")].owners for v in node.values if v.startswith("gradient "))
            yield from _unmet(dag, name, dict.fromkeys(o for each in owners for o in each), before=False)


def _is_end(node: Node, owned: Ownership) -> bool:
    if owned.num_copies > 1:
        return isinstance(node, Collective) and node.kind in REDUCTIONS and node.group == owned.group.name
    return isinstance(node, Update) and node.group in owned.owners


def _lost_rounds(dag: Dag) -> Iterator[PlanError]:
    """Collectives between and after updates that miss the update of one of their groups."""
    for name, node in dag.nodes.items():
        if isinstance(node, Collective) and name.PASS == "U":
            members = members_of(node.group or "", dag.groups)
            yield from _unmet(dag, name, members, before=True)
            if any(value.startswith("update scalars ") for value in node.values):
                yield from _unmet(dag, name, members, before=False)


def _unmet(dag: Dag, name: NodeId, groups: Iterable[str], before: bool) -> Iterator[PlanError]:
    """Groups whose update no data edge joins to a collective that comes before or after it."""
    joined = _updates_around(dag)[before].get(name, set())
    for group in groups:
        if group not in joined:
            yield PlanError(
                f"{name} does not wait for the update of {group}."
                if before
                else f"the update of {group} does not wait for {name}.",
                help="complete the plan again from its directives.",
                node=name,
            )


def _updates_around(dag: Dag) -> tuple[Mapping[NodeId, set[str]], Mapping[NodeId, set[str]]]:
    """For each collective the groups whose updates come after it, and those whose updates come before it."""
    known = dag.memo.get("updates around")
    if known is None:
        after: dict[NodeId, set[str]] = {}
        before: dict[NodeId, set[str]] = {}
        for edge in dag.data:
            src, dst = dag.nodes[edge.src], dag.nodes[edge.dst]
            if isinstance(src, Collective) and isinstance(dst, Update):
                after.setdefault(edge.src, set()).add(dst.group or "")
            elif isinstance(src, Update) and isinstance(dst, Collective):
                before.setdefault(edge.dst, set()).add(src.group or "")
        known = dag.memo["updates around"] = (after, before)
    return known


def ungathered_shards(checked: Checked) -> Iterator[PlanError]:
    """Shards that nothing makes whole where they are needed so: after an update, or for it."""
    dag = checked.dag
    sharded = [o for o in ownerships(dag).values() if o.num_shards > 1]
    if not sharded:
        return
    first, last = _updates_of_round(dag, False), _updates_of_round(dag, True)
    reductions = _reductions(dag)
    after = _gathered(dag, sharded, {(edge.dst, last[edge.src]) for edge in dag.data if edge.src in last})
    before = _gathered(dag, sharded, {(edge.src, first[edge.dst]) for edge in dag.data if edge.dst in first})
    given = {(edge.src, edge.dst) for edge in dag.data if edge.src in set[NodeId]().union(*reductions.values())}
    for o in sharded:
        kept, parameters = o.replication.shard_params, f"parameters {o.bucket}"
        reduced = reductions.get(o.bucket, ())
        wanted = [f"state {o.bucket}", *([parameters] if kept else []), *([f"gradient {o.bucket}"] if reduced else [])]
        for owner in o.owners:
            if o.elementwise and not kept and (parameters, owner) not in after:
                yield _ungathered(f"the parameters {o.bucket} are not gathered after the update of {owner}", o)
            for value in () if o.elementwise else wanted:
                gather = before.get((value, owner))
                if gather is None:
                    yield _ungathered(f"the update of {owner} needs {value} whole, and nothing gathers it", o)
                elif value.startswith("gradient ") and any((node, gather) not in given for node in reduced):
                    yield _ungathered(f"{gather} does not wait for all reductions of {o.bucket}", o)


def _ungathered(fault: str, owned: Ownership) -> PlanError:
    return PlanError(f"{fault}.", help="complete the plan again from its directives.", bucket=owned.bucket)


def _updates_of_round(dag: Dag, latest: bool) -> dict[NodeId, str]:
    """The first or the last update of every group."""
    found: dict[str, Update] = {}
    for node in dag.nodes.values():
        if isinstance(node, Update):
            known = found.get(node.group or "")
            if known is None or (node.round > known.round) == latest:
                found[node.group or ""] = node
    return {node.id: group for group, node in found.items()}


def _gathered(
    dag: Dag, sharded: Iterable[Ownership], pairs: Iterable[tuple[NodeId, str]]
) -> dict[tuple[str, str], NodeId]:
    """The gather over all owners of each value that has an edge to or from an update, by value and the update's group.

    Args:
      pairs: nodes beside an update, and the update's group.
    """
    where = {o.bucket: o.group.name for o in sharded}
    found: dict[tuple[str, str], NodeId] = {}
    for name, owner in pairs:
        node = dag.nodes[name]
        if isinstance(node, Collective) and node.kind == "all_gather":
            found |= {(v, owner): name for v in node.values if where.get(v.partition(" ")[2]) == node.group}
    return found


def _reductions(dag: Dag) -> dict[str, set[NodeId]]:
    """The reductions of each bucket's gradients."""
    found: dict[str, set[NodeId]] = {}
    for name, node in dag.nodes.items():
        if isinstance(node, Collective) and node.kind in REDUCTIONS:
            for value in node.values:
                found.setdefault(value.removeprefix("gradient "), set()).add(name)
    return found


def freed_parameters(checked: Checked) -> Iterator[PlanError]:
    """Reads of parameters that are sharded between uses, without a gather that keeps them alive."""
    dag = checked.dag
    sharded = {n for n, o in ownerships(dag).items() if o.replication.shard_params and o.num_copies > 1}
    if not sharded:
        return
    alive: dict[NodeId, set[str]] = {}
    for edge in dag.data:
        src = dag.nodes[edge.src]
        if isinstance(src, Collective) and src.kind == "all_gather":
            alive.setdefault(edge.dst, set()).update(value.removeprefix("parameters ") for value in edge.values)
    for name, node in dag.nodes.items():
        if not isinstance(node, Compute):
            continue
        op = dag.ops[name.op]
        for bucket in op.reads:
            freed = bucket in sharded and bucket not in alive.get(name, ())
            if freed and leaves_read(op, name.PASS, dag.buckets[bucket]):
                yield PlanError(
                    f"{name} reads the parameters {bucket} after they are freed.",
                    help="every use under ZeRO-3 follows a gather; complete the plan again.",
                    node=name,
                )
