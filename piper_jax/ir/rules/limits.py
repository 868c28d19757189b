"""Rules about sizes."""

from __future__ import annotations

from collections.abc import Iterator

from piper_jax.errors import PlanError, counted
from piper_jax.ir.batches import values_by_row
from piper_jax.ir.device_groups import REPLICA_AXES, axis_size
from piper_jax.ir.nodes import Compute
from piper_jax.ir.rules.base import Checked


def undivided_batches(checked: Checked) -> Iterator[PlanError]:
    """Values whose batch rows are not a multiple of microbatches times replicas."""
    dag = checked.dag
    used = dict.fromkeys(node.group or "" for node in dag.nodes.values() if isinstance(node, Compute))
    replicas = {group: axis_size(dag.groups[group], REPLICA_AXES) for group in used}
    for value, rows in values_by_row(dag):
        for group, count in replicas.items():
            parts = dag.num_microbatches * count
            if rows % parts:
                yield PlanError(
                    f"{counted(rows, 'row')} of {value.name} are not divisible by "
                    f"{counted(dag.num_microbatches, 'microbatch')} x {counted(count, 'replica')} of {group}.",
                    help=f"use a batch of {parts * max(1, round(rows / parts))} rows, or other degrees.",
                    value=value.name,
                )


def exceeded_memory(checked: Checked) -> Iterator[PlanError]:
    """Groups whose devices would hold more than the limit."""
    limit = checked.memory_limit
    if limit is None:
        return
    over = {group: peak for group, peak in checked.peak_bytes.items() if peak > limit}
    if over:
        worst = max(over, key=lambda group: over[group])
        yield PlanError(
            f"a device of {worst} holds {over[worst]:,} bytes at its peak, the limit is {limit:,}.",
            detail=(f"{group}: {peak:,} bytes" for group, peak in over.items()),
            help="use more stages, remat, a higher ZeRO stage, or a schedule that keeps fewer microbatches.",
            peaks=over,
        )
