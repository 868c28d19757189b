"""From a completed DAG to the context of its lowering, or to the reason why it cannot be lowered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piper_jax.errors import PlanError, counted
from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Compute
from piper_jax.ir.ownership import ownerships
from piper_jax.lowering.context import Context
from piper_jax.lowering.group_mesh import group_mesh
from piper_jax.tracing.local_experts import EXPERT_AXIS
from piper_jax.tracing.source import Source


def lowering_context(dag: Dag, source: Source, devices: Sequence[Any], batch_size: int, *, training: bool) -> Context:
    """Checks what the lowering supports and gathers its tables.

    Raises:
      PlanError: batch not divisible, groups of different size, or a directive that is not lowered yet.
    """
    used = {str(n.group) for n in dag.nodes.values() if isinstance(n, Compute)}
    meshes = {g: group_mesh(dag.groups[g], devices) for g in dag.groups if g in used}
    replicas = {g: m.replicas for g, m in meshes.items()}
    if len({(m.replicas, m.tensor) for m in meshes.values()}) > 1:
        raise PlanError(
            "compile: device groups of different size are planned, but not lowered yet.",
            detail=[f"{g}: {counted(m.replicas, 'replica')} x {m.tensor} tensor" for g, m in meshes.items()],
            help="give every stage the same number of devices.",
        )
    slices = dag.num_microbatches * next(iter(replicas.values()))
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
