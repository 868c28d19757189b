"""The stages of a plan as a table: what is on each, and how equal they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from piper_jax.ir.columns import aligned, bytes_text
from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Op

HEADER = ("stage", "modules", "operations", "parameters", "out")


def stage_lines(dag: Dag) -> list[str]:
    """A heading and a row for each stage: its modules, its share of all operations, its parameters, and the bytes of
    the whole batch that go from it to other stages. Parameters of several stages count in each."""
    stages = _stages(dag)
    total = sum(op.flops for ops in stages.values() for op in ops) or 1
    out = _bytes_out(dag)
    rows = [
        (
            f"PP={stage}",
            " ".join(op.name for op in ops),
            f"{sum(op.flops for op in ops) / total:.1%}",
            f"{_parameters(dag, ops):,}",
            bytes_text(out.get(stage, 0)),
        )
        for stage, ops in sorted(stages.items())
    ]
    return [f"  {line}" for line in aligned(HEADER, rows, left=2)] if rows else []


def largest_share(dag: Dag) -> float:
    """The part of all operations that the largest stage has."""
    work = [sum(op.flops for op in ops) for ops in _stages(dag).values()]
    return max(work, default=0) / (sum(work) or 1)


def _stages(dag: Dag) -> dict[int, list[Op]]:
    stages: dict[int, list[Op]] = {}
    for op in dag.ops.values():
        if op.PP is not None:
            stages.setdefault(op.PP, []).append(op)
    return stages


def _parameters(dag: Dag, ops: Sequence[Op]) -> int:
    read = dict.fromkeys(bucket for op in ops for bucket in op.reads)
    return sum(math.prod(leaf.shape) for b in read if b in dag.buckets for leaf in dag.buckets[b].leaves)


def _bytes_out(dag: Dag) -> dict[int, int]:
    """For each stage, the bytes of the values of its forward passes that other stages read."""
    sent: dict[int, set[str]] = {}
    for edge in dag.data:
        src, dst = dag.ops.get(edge.src.op), dag.ops.get(edge.dst.op)
        if src and dst and src.PP is not None and dst.PP is not None and src.PP < dst.PP and edge.src.PASS == "F":
            sent.setdefault(src.PP, set()).update(edge.values)
    return {stage: sum(dag.values[v].nbytes for v in values if v in dag.values) for stage, values in sent.items()}
