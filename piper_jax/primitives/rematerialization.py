"""``remat``: activations are computed again in the backward pass instead of saved."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from piper_jax.errors import DirectiveError, counted, suggest
from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import Filter
from piper_jax.ir.forward import Rewritten
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Compute
from piper_jax.ir.selection import keep_index, select

POLICIES = (
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
)
"""Names in ``jax.checkpoint_policies``."""


def policy_name(policy: object) -> object:
    """The name of a policy of JAX, which need not be a function; anything else as it is."""
    jax = sys.modules.get("jax")
    known = getattr(jax, "checkpoint_policies", None)
    return next((n for n in POLICIES if policy is getattr(known, n, None)), getattr(policy, "__name__", policy))


def remat(dag: Dag, filter: Filter, *, policy: str = "nothing_saveable") -> Rewritten:
    """Saves only what ``policy`` allows of the selected operations, and computes the rest again in the backward pass.

    Also called activation checkpointing or recomputation (Chen et al., arXiv 1604.06174). ::

        F layers.0 --all residuals--> B layers.0
        -->  remat(where(path="layers.0"), policy="nothing_saveable")
        F layers.0 --inputs only--> B layers.0 (F again, then B)

    Args:
      dag: the plan's DAG.
      filter: nodes whose operations are meant, in all their passes and microbatches.
      policy: the name of a policy in ``jax.checkpoint_policies`` that takes no arguments.

    Raises:
      DirectiveError: an unknown policy, an operation that has another policy already, or one that is selected in part.
    """
    if policy not in POLICIES:
        named = getattr(policy, "__qualname__", policy)
        if callable(policy) or str(policy).startswith(("save_", "offload_")):
            raise DirectiveError(
                f"policy {named!r}: policies that take arguments, such as names to save, are not supported.",
                help=f"use one of {', '.join(POLICIES[:4])}.",
            )
        raise DirectiveError(f"unknown policy {policy!r}.", help=suggest(str(policy), POLICIES))
    chosen = select(dag, filter)
    _require_whole(dag, filter, chosen)
    ops = dict(dag.ops)
    for node in chosen:
        op = dag.ops.get(node.op)
        if op is None:
            raise DirectiveError(f"{node} saves no activations.", help='leave PASS="U" out.')
        if op.remat not in (None, policy):
            raise DirectiveError(
                f"{op.name} has the policy {op.remat} already.",
                help="let each operation be selected by one remat directive.",
                conflict="remat",
                node=node,
            )
        ops[op.name] = replace(op, remat=policy)
    return Rewritten(keep_index(dag, replace(dag, ops=ops)))


def _require_whole(dag: Dag, filter: Filter, chosen: Collection[NodeId]) -> None:
    """An operation is computed again in all its microbatches or in none."""
    selected = Counter(node.op for node in chosen)
    present = Counter(node.op for node, known in dag.nodes.items() if isinstance(known, Compute))
    for op, count in present.items():
        if 0 < selected[op] < count:
            raise DirectiveError(
                f"{filter} selects {selected[op]} of the {counted(count, 'node')} of {op}.",
                help="an operation is computed again in all its passes and microbatches: name PP, EP or a path alone.",
            )
