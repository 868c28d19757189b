"""From a completed DAG to the context of its lowering, or to the reason why it cannot be lowered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piper_jax.errors import PlanError, counted
from piper_jax.ir.carried import carried
from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Compute, Send
from piper_jax.ir.ownership import ownerships
from piper_jax.lowering.context import Context
from piper_jax.lowering.group_mesh import GroupMesh, group_mesh
from piper_jax.tracing.local_experts import EXPERT_AXIS
from piper_jax.tracing.source import Source


def lowering_context(
    dag: Dag, source: Source, devices: Sequence[Any], batch_size: int, *, training: bool,
    process: int | None = None,
) -> Context:  # fmt: skip
    """Checks what the lowering supports and gathers its tables.

    Args:
      process: the one whose part is lowered, of several; None drives all devices itself.

    Raises:
      PlanError: batch not divisible, groups that divide it in other ways, or a directive that is not lowered yet.
    """
    used = {str(n.group) for n in dag.nodes.values() if isinstance(n, Compute)}
    meshes = {g: group_mesh(dag.groups[g], devices) for g in dag.groups if g in used}
    replicas = max(m.replicas for m in meshes.values())
    _refuse_unequal(dag, meshes, replicas)
    if process is not None:
        _refuse_unequal_across(dag, meshes)
    slices = dag.num_microbatches * replicas
    if batch_size % slices or not batch_size:
        nearest = [n for n in (batch_size // slices * slices, -(-batch_size // slices) * slices) if n] or [slices]
        raise PlanError(
            f"compile: a batch of {counted(batch_size, 'row')} cannot be divided into "
            f"{counted(dag.num_microbatches, 'microbatch')} x "
            f"{counted(slices // dag.num_microbatches, 'replica')} = {counted(slices, 'slice')}.",
            help=f"use a batch of {' or '.join(map(str, nearest))} rows, or another num_microbatches.",
        )
    _refuse_unlowered(dag)
    return Context(
        dag=dag,
        source=source,
        program=source.at(batch_size // slices),
        meshes=meshes,
        batch_size=batch_size,
        training=training and not source.forward_only,
        process=process,
    )


def _refuse_unequal(dag: Dag, meshes: Mapping[str, GroupMesh], replicas: int) -> None:
    """Groups of different size are lowered where each device of the smaller ones takes several whole slices."""
    sizes = [
        f"{g}: {counted(m.replicas, 'replica')}" + f" x {m.tensor} tensor" * (m.tensor > 1) for g, m in meshes.items()
    ]
    if any(replicas % m.replicas for m in meshes.values()) or len({m.tensor for m in meshes.values()}) > 1:
        raise PlanError(
            "compile: these device groups do not divide a microbatch alike.",
            detail=sizes,
            help="let the replicas of each group divide those of the largest, with tensor axes of one size.",
        )
    if len({m.replicas for m in meshes.values()}) == 1:
        return
    several = {bucket for bucket, o in carried(dag).items() if len(o.owners) > 1}
    experts = {op.name for op in dag.ops.values() if op.shard_axis is not None or op.row_bound is not None}
    for what, found in (("state that several groups carry on", several), ("experts", experts)):
        if found:
            raise PlanError(
                f"compile: {what} ({min(found)}) on groups of different size can be planned and simulated, but is not "
                "lowered yet.",
                detail=sizes,
                help="give every stage the same number of devices.",
            )


def _refuse_unequal_across(dag: Dag, meshes: Mapping[str, GroupMesh]) -> None:
    """Between processes, arrays move from each device to one other."""
    for node in dag.nodes.values():
        if not isinstance(node, Send):
            continue
        source, target = meshes[str(node.group)], meshes[node.peer]
        if source.replicas != target.replicas and len(source.processes | target.processes) > 1:
            raise PlanError(
                f"compile: {source.name} sends to {target.name}, a group of another size, and they lie in several "
                "processes; this runs in one process only.",
                detail=[f"{m.name}: {counted(m.replicas, 'replica')}" for m in (source, target)],
                help="give these stages the same number of devices, or start one process.",
            )


def _refuse_unlowered(dag: Dag) -> None:
    def refuse(what: str, where: str) -> None:
        raise PlanError(f"compile: {what} ({where}) can be planned, checked and simulated, but is not lowered yet.")

    for op in dag.ops.values():
        if op.shard_axis not in (None, EXPERT_AXIS):
            refuse(f"sharding over {op.shard_axis}", f"operation {op.name}")
    for bucket, owned in ownerships(dag).items():
        if owned.num_parts > 1 and not owned.elementwise:
            raise PlanError(
                f"compile: the optimizer updates {bucket} in another way than element by element, which needs all of "
                f"its experts on one device.",
                help="use expert_parallel=1, or an elementwise optimizer (adamw, lion, sgd) for the experts.",
            )
