"""Rules about parameters, their gradients and their updates."""

from __future__ import annotations

from collections.abc import Iterator

from piper_jax.errors import PlanError
from piper_jax.ir.dag import Dag
from piper_jax.ir.device_groups import axes_of
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, Update
from piper_jax.ir.ownership import owners_of, ownerships, shard_axes_of
from piper_jax.ir.rules.base import Checked

REPLICA_AXES = ("data", "expert")


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


def _lost_gradients(dag: Dag) -> Iterator[PlanError]:
    """Gradients that miss the reduction of their bucket, where there is one."""
    arriving: dict[str, set[NodeId]] = {}
    producers: dict[str, set[NodeId]] = {}
    reduced = ownerships(dag)
    for edge in dag.data:
        src, dst = dag.nodes[edge.src], dag.nodes[edge.dst]
        for value in edge.values:
            bucket = value.removeprefix("gradient ")
            if bucket == value or bucket not in reduced:
                continue
            if isinstance(src, Compute):
                producers.setdefault(bucket, set()).add(edge.src)
                is_end = isinstance(dst, Collective) if reduced[bucket].num_copies > 1 else isinstance(dst, Update)
                if is_end and (dst.group == reduced[bucket].group.name):
                    arriving.setdefault(bucket, set()).add(edge.src)
    for bucket, nodes in producers.items():
        for lost in sorted(nodes - arriving.get(bucket, set()), key=str):
            yield PlanError(
                f"the gradient of {bucket} from {lost} does not reach its {_end(reduced[bucket].num_copies)}.",
                help="complete the plan again from its directives.",
                bucket=bucket,
            )


def _end(num_copies: int) -> str:
    return "reduction" if num_copies > 1 else "update"


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
        if not isinstance(node, Compute) or name.PASS == "BW":
            continue
        for bucket in dag.ops[name.op].reads:
            if bucket in sharded and bucket not in alive.get(name, ()):
                yield PlanError(
                    f"{name} reads the parameters {bucket} after they are freed.",
                    help="every use under ZeRO-3 follows a gather; complete the plan again.",
                    node=name,
                )
