"""Rules about state that the loss function changes and steps carry on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from piper_jax.errors import PlanError
from piper_jax.ir.carried import carry_of, givers, reduced_carries
from piper_jax.ir.dag import Dag
from piper_jax.ir.ids import NodeId
from piper_jax.ir.linear import dispatch_order
from piper_jax.ir.nodes import Bucket, Collective
from piper_jax.ir.rules.base import Checked

IN_ORDER = ("sequential", "equal")
ONE_GROUP = "use a schedule that runs the whole of it on one group, microbatch by microbatch (1F1B)"
ONCE_A_STEP = 'or declare the state once a step: carry="mean" or "sum".'
ONCE_A_STEP_BY_ITSELF = 'or declare it once a step, as floats: carry="mean".'
ONE_STAGE = (
    "read and change it in one stage alone (fewer stages, or stages=[...] that hold it together), or let every slice "
    'see the value of the step\'s start: carry="mean".'
)


def disordered_carries(checked: Checked) -> Iterator[PlanError]:
    """State that each microbatch takes over from the one before it, where a plan does not keep that order.

    What no batch changes, each operation that reads it carries on for itself.
    """
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
        readers = {op.name: forward.get(op.name, []) for op in dag.ops.values() if name in op.reads}
        itself = carry_of(bucket) == "equal" and all(name in dag.ops[op].carries for op in readers)
        if (fault := _parted(dag, readers)) is not None:
            yield _disordered(bucket, fault, f"{ONE_GROUP}, {ONCE_A_STEP_BY_ITSELF if itself else ONCE_A_STEP}")
        elif len(readers) > 1 and not itself:
            yield _disordered(bucket, f"but {_some(_placed(dag, readers))} read or change it", ONE_STAGE)


def _parted(dag: Dag, readers: Mapping[str, list[NodeId]]) -> str | None:
    """What is wrong with one operation on its own: on several groups, or in another order."""
    for op, nodes in readers.items():
        groups = list(dict.fromkeys(str(dag.nodes[node].group) for node in nodes))
        if len(groups) > 1:
            return f"but {' and '.join(groups)} each run a part of {op}"
        order = [node.MB or 0 for node in nodes]
        if order != sorted(order):
            return f"but {groups[0]} runs {op} in the order {', '.join(map(str, order))}"
    return None


def _placed(dag: Dag, readers: Mapping[str, list[NodeId]]) -> list[str]:
    groups = {op: dag.nodes[nodes[0]].group if nodes else None for op, nodes in readers.items()}
    return [f"{op} ({group})" if group else op for op, group in groups.items()]


def _some(names: Sequence[str]) -> str:
    return " and ".join(names if len(names) < 4 else (*names[:2], f"{len(names) - 2} more"))


def _disordered(bucket: Bucket, fault: str, help: str) -> PlanError:
    return PlanError(
        f"{bucket.leaves[0].path} is carried from microbatch to microbatch, {fault}.",
        detail=(f"changed by {_some(bucket.changed_by)}",) if bucket.changed_by else (),
        help=help,
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
