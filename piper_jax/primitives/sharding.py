"""``shard``: experts, or parameters by their own metadata, are divided over a mesh axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from piper_jax.errors import DirectiveError, suggest
from piper_jax.hints import Name
from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import Filter
from piper_jax.ir.forward import Rewritten
from piper_jax.ir.selection import keep_index, select
from piper_jax.primitives.tensor import TENSOR, over_tensor_axis

SHARD_AXES = ("expert", TENSOR)


def shard(
    dag: Dag, filter: Filter, *, axis: str = "expert", stream: Name = "compute", rules: Any = None, dims: Any = None
) -> Rewritten:
    """Divides the selected operations and their parameters over a mesh axis.

    Over ``expert``, each device holds some of the experts of an expert region, and an explicit all_to_all moves the
    dispatched tensors in and out, forward and backward (GShard, arXiv 2006.16668). Over ``tensor``, parameters are
    divided by the model's own metadata; the compiler partitions what works on them, and no node is added. ::

        F[PP=0] gate --> F[PP=0,EP=0] experts --> F[PP=0] combine
        -->  shard(where(EP=0), axis="expert")
        F gate --> all_to_all enter --> F[PP=0,EP=0] experts --> all_to_all leave --> F combine

    Args:
      dag: the plan's DAG.
      filter: nodes whose operations are meant; for ``expert`` they lie in expert regions (they have an EP).
      axis: ``"expert"`` or ``"tensor"``.
      stream: of the collectives around experts.
      rules: for ``tensor``: names of dimensions -> ``"tensor"``, a mapping or pairs; by default the usual names.
      dims: for ``tensor``: patterns of paths -> the dimension, for parameters without names.

    Raises:
      DirectiveError: an unknown axis, an operation outside of expert regions, or one sharded in another way already.
    """
    if axis not in SHARD_AXES:
        raise DirectiveError(f"there is no axis {axis!r} to shard over.", help=suggest(axis, SHARD_AXES))
    if axis == TENSOR:
        chosen = dict.fromkeys(node.op for node in select(dag, filter) if node.op in dag.ops)
        return over_tensor_axis(dag, chosen, rules, dims)
    if rules is not None or dims is not None:
        raise DirectiveError("rules and dims mean nothing for experts.", help='give them with axis="tensor".')
    ops = dict(dag.ops)
    for node in select(dag, filter):
        op = dag.ops.get(node.op)
        if op is None or op.EP is None:
            raise DirectiveError(
                f"{node} is not in an expert region.",
                help="select expert regions, such as where(EP=...), or wrap the experts in piper.expert_region.",
            )
        if op.shard_axis is not None and (op.shard_axis, op.shard_stream) != (axis, stream):
            raise DirectiveError(
                f"{op.name} is sharded over {op.shard_axis} on stream {op.shard_stream} already.",
                help="let each operation be selected by one shard directive.",
                conflict="shard",
                node=node,
            )
        ops[op.name] = replace(op, shard_axis=axis, shard_stream=stream)
    return Rewritten(keep_index(dag, replace(dag, ops=ops)))
