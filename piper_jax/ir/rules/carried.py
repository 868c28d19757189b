"""Rules about state that the loss function changes and steps carry on."""

from __future__ import annotations

from collections.abc import Iterator

from piper_jax.errors import PlanError
from piper_jax.ir.carried import carry_of, givers, reduced_carries
from piper_jax.ir.dag import Dag
from piper_jax.ir.ids import NodeId
from piper_jax.ir.linear import dispatch_order
from piper_jax.ir.nodes import Bucket, Collective
from piper_jax.ir.rules.base import Checked

IN_ORDER = ("sequential", "equal")


def disordered_carries(checked: Checked) -> Iterator[PlanError]:
    """State that each microbatch takes over from the one before it, where a plan does not keep that order."""
    dag = checked.dag
    wanted = {name: bucket for name, bucket in dag.buckets.items() if carry_of(bucket) in IN_ORDER}
    if not wanted:
        return
    forward: dict[str, list[NodeId]] = {}
    for slot in dispatch_order(dag):
        for node in slot.nodes:
            if node.PASS == "F" and node.op in dag.ops:
                forward.setdefault(node.op, []).append(node)
    for name, bucket in wanted.items():
        readers = [op.name for op in dag.ops.values() if name in op.reads]
        groups = list(dict.fromkeys(dag.nodes[n].group or "" for op in readers for n in forward.get(op, ())))
        if len(groups) > 1:
            yield _disordered(dag, bucket, f"but {' and '.join(groups)} each run a part of {_ops(readers)}")
        elif len(readers) > 1:
            yield _disordered(dag, bucket, f"but {_ops(readers)} both read or change it")
        else:
            order = [n.MB or 0 for op in readers for n in forward.get(op, ())]
            if order != sorted(order):
                text = ", ".join(str(mb) for mb in order)
                yield _disordered(dag, bucket, f"but {groups[0]} runs them in the order {text}")


def _ops(names: list[str]) -> str:
    return " and ".join(dict.fromkeys(names))


def _disordered(dag: Dag, bucket: Bucket, fault: str) -> PlanError:
    op = next(op for op in dag.ops.values() if bucket.name in op.reads)
    return PlanError(
        f"{bucket.leaves[0].path} is carried from microbatch to microbatch, {fault}.",
        detail=(f"changed by {op.path or op.name}" + (f" at {op.source}" if op.source else ""),),
        help="use a schedule that runs the whole of it on one group, microbatch by microbatch (1F1B), or declare the "
        'state once a step: carry="mean" or "sum".',
        bucket=bucket.name,
    )


def lost_carries(checked: Checked) -> Iterator[PlanError]:
    """What a forward pass leaves for the next step, and no reduction takes in."""
    dag = checked.dag
    arriving = {
        (edge.src, value) for edge in dag.data if isinstance(dag.nodes[edge.dst], Collective) for value in edge.values
    }
    for bucket in reduced_carries(dag):
        for name in givers(dag, bucket):
            if (name, f"carried {bucket}") not in arriving:
                yield PlanError(
                    f"what {name} leaves of {bucket} for the next step does not reach its reduction.",
                    help="complete the plan again from its directives.",
                    bucket=bucket,
                )
