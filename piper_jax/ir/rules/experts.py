"""Rules about experts that are divided over devices."""

from __future__ import annotations

from collections.abc import Iterator

from piper_jax.errors import PlanError, counted
from piper_jax.ir.dag import Dag
from piper_jax.ir.device_groups import axis_size
from piper_jax.ir.nodes import Compute, Op
from piper_jax.ir.rules.base import Checked


def undivided_experts(checked: Checked) -> Iterator[PlanError]:
    """Expert regions whose parameters have no equal part for each device, or which others read whole."""
    dag = checked.dag
    for op, group, devices in _sharded(dag):
        shapes = {leaf.path: leaf.shape for bucket in op.reads for leaf in dag.buckets[bucket].leaves}
        sizes = {shape[0] if shape else 0 for shape in shapes.values()}
        if len(sizes) > 1 or 0 in sizes:
            yield PlanError(
                f"the parameters of {op.name} do not all have the experts on dimension 0.",
                detail=(f"{path}: {list(shape)}" for path, shape in list(shapes.items())[:4]),
                help="keep other parameters out of the expert region, or use expert_parallel=1.",
            )
        elif sizes and max(sizes) % devices:
            (count,) = sizes
            *others, most = (str(n) for n in range(1, count + 1) if count % n == 0)
            degrees = f"{', '.join(others)} or {most}" if others else most
            yield PlanError(
                f"{counted(count, 'expert')} of {op.name} cannot be divided over the {devices} devices of {group}'s "
                "expert axis.",
                help=f"use expert_parallel={degrees}.",
            )
        for other in dag.ops.values():
            if other.shard_axis is None and (both := set(other.reads) & set(op.reads)):
                yield PlanError(
                    f"{other.name} reads {sorted(both)[0]} whole, whose experts are divided for {op.name}.",
                    help="read the parameters of experts inside their region alone, or use expert_parallel=1.",
                )


def _sharded(dag: Dag) -> Iterator[tuple[Op, str, int]]:
    """Operations over several devices of an expert axis, with one of their groups."""
    placed = {node.id.op: str(node.group) for node in dag.nodes.values() if isinstance(node, Compute)}
    for op in dag.ops.values():
        if op.shard_axis == "expert" and op.name in placed:
            devices = axis_size(dag.groups[placed[op.name]], ("expert",))
            if devices > 1:
                yield op, placed[op.name], devices
