"""Places another function of the same parameters as an existing plan does, for evaluation and prediction."""

from __future__ import annotations

from glob import escape

from piper_jax.ir.filters import where
from piper_jax.ir.nodes import Compute
from piper_jax.planning import Plan


def follow(plan: Plan, other: Plan) -> Plan:
    """``other`` with the stages, microbatches, groups, divided experts and parameters of ``plan``.

    Args:
      plan: a finished plan.
      other: a fresh trace of another function of the same parameters; with fewer units than stages it is on the first.
    """
    places, stage_units = plan.source.units.places, dict[int, set[int]]()
    for op in plan.dag.ops.values():
        stage_units.setdefault(op.PP or 0, set()).update(places[u].PP for u in op.units)
    num_units = len({op.PP for op in other.dag.ops.values()})
    if num_units == sum(map(len, stage_units.values())):
        other = other.cut(stages=[tuple(sorted(stage_units[s])) for s in sorted(stage_units)])
    else:
        other = other.cut(stages=min(num_units, len(stage_units)))
    if plan.is_split:
        other = other.split(where(), num_microbatches=plan.num_microbatches)
    for node in plan.dag.nodes.values():
        if isinstance(node, Compute) and node.id.PASS == "F" and (node.id.PP or 0) < num_units:
            microbatch = {} if node.id.MB is None else {"MB": node.id.MB}
            other = other.place(where(PP=node.id.PP, **microbatch), group=plan.dag.groups[str(node.group)])
    for op in plan.dag.ops.values():
        if op.shard_axis is not None and any(found.EP == op.EP for found in other.dag.ops.values()):
            other = other.shard(where(EP=op.EP), axis=op.shard_axis, stream=op.shard_stream)
    divided = [leaf for bucket in plan.dag.buckets.values() for leaf in bucket.leaves if leaf.tensor_dim is not None]
    if divided:
        other = other.shard(where(), axis="tensor", dims={escape(leaf.path): leaf.tensor_dim for leaf in divided})
    return other
