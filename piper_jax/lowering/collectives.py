"""Collectives on state: gradient reductions, and the gathers of ZeRO. Members of slots, of updates, or alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from piper_jax.ir.fusion import STATE, When, when_of
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective
from piper_jax.ir.ownership import Ownership
from piper_jax.lowering.context import Context
from piper_jax.lowering.fences import after_fence
from piper_jax.lowering.keys import Key
from piper_jax.lowering.shards import gather_whole, scatter_sum

Does = Literal["reduce", "scatter", "accumulate", "gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCollective:
    """One collective node as a function of local arrays, on one group or, with owners side by side, on a joint one.

    Attributes:
      does: sum accumulators over the copies to gradients; the same to shards; add the sum of one span of microbatches
        to accumulated shards; or gather shards.
      when: beside compute, or as part of an update, before or after it.
      chain: collectives of one program and chain follow each other; those of different chains may overlap.
      reads, writes: keys on ``group``, in pairs (``accumulate`` also reads what it writes).
    """

    context: Context
    group: str
    id: NodeId
    does: Does
    when: When
    owned: Ownership
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    chain: str = ""

    @property
    def mb(self) -> int:
        return self.id.MB or 0

    @property
    def word(self) -> str:
        """What the label of a program calls it."""
        return self.does

    @property
    def serves_update(self) -> bool:
        """Whether nothing but the update needs it."""
        return self.does == "gather" and self.when != "slot"

    def run(self, env: dict[Key, Any]) -> None:
        """Replaces what it reads by what it writes, after the collectives before it on its chain."""
        values = [env[k] for k in self.reads[: len(self.writes)]]
        fence = Key("fence", self.group, self.chain)
        values = after_fence(self.context, env, fence, values)
        axes, count = self.owned.axes, self.owned.num_shards
        match self.does:
            case "reduce":
                specs = [self.context.whole_spec(k) for k in self.writes]
                wide = [v.astype(jnp.promote_types(v.dtype, s.dtype)) for v, s in zip(values, specs, strict=True)]
                results = flat_sum(wide, axes) if self.context.tensor == 1 else jax.lax.psum(wide, axes)
            case "scatter" | "accumulate":
                results = scatter_sum(values, axes, count)
            case "gather":
                results = gather_whole(values, [self.context.whole_spec(k).shape for k in self.writes], axes)
        env[fence] = next((r for r in results if r.size), env.get(fence, results[0]))
        for key, value in zip(self.writes, results, strict=True):
            if self.does == "accumulate":
                env[key] = env[key] + value
            else:
                env[key] = value.astype(self.context.whole_spec(key).dtype)


def flat_sum(arrays: Sequence[Any], axes: tuple[str, ...]) -> list[Any]:
    """Sums over mesh axes, all arrays of one dtype in ONE all-reduce."""
    sums: list[Any] = [None] * len(arrays)
    for dtype in dict.fromkeys(a.dtype for a in arrays):
        chosen = [k for k, a in enumerate(arrays) if a.dtype == dtype]
        total = jax.lax.psum(jnp.concatenate([arrays[k].reshape(-1) for k in chosen]), axes)
        start = 0
        for k in chosen:
            sums[k] = total[start : start + arrays[k].size].reshape(arrays[k].shape)
            start += arrays[k].size
    return sums


def state_buckets(node: Collective) -> tuple[str, ...]:
    """Buckets whose gradients, parameters, moments or carried state a collective moves, maybe several at once."""
    parts = (v.partition(" ") for v in node.values)
    return tuple(dict.fromkeys(b for what, _, b in parts if what in STATE and b))


def state_collective(context: Context, node: Collective) -> StateCollective | None:
    """What a collective on state does; None for one on other values."""
    buckets = state_buckets(node)
    if buckets and buckets[0] in context.carried:
        return _carried(context, node, buckets)
    if not buckets or buckets[0] not in context.owned:
        return None
    owned, group = context.owned[buckets[0]], str(node.group)
    leaves = [leaf for bucket in buckets for leaf in context.source.bucket_leaves[bucket]]
    gradients = [Key("gradient", group, leaf) for leaf in leaves]
    accumulators = [Key("accumulator", group, leaf) for leaf in leaves]
    if node.kind == "all_reduce":
        does, reads, writes = "reduce", accumulators, gradients
    elif node.kind == "reduce_scatter" and owned.span is not None:
        given = [leaf for leaf in leaves if leaf in context.with_gradient]
        does, writes = "accumulate", [Key("accumulator", group, leaf).shard for leaf in given]
        reads = [*(unreduced_key(context, group, leaf, node.id.MB or 0) for leaf in given), *writes]
    elif node.kind == "reduce_scatter":
        does, reads, writes = "scatter", accumulators, [key.shard for key in gradients]
    else:
        does, writes = "gather", list(_gathered(context, node, group, leaves))
        reads = [key.shard for key in writes]
    return StateCollective(
        context=context, group=group, id=node.id, does=does, when=when_of(context.dag, node), owned=owned,
        reads=tuple(reads), writes=tuple(writes), chain=context.chain_of(node),
    )  # fmt: skip


def _carried(context: Context, node: Collective, buckets: Sequence[str]) -> StateCollective:
    leaves, group = [leaf for b in buckets for leaf in context.source.bucket_leaves[b]], str(node.group)
    return StateCollective(
        context=context, group=group, id=node.id, does="reduce", when=when_of(context.dag, node),
        owned=context.carried[buckets[0]], reads=tuple(Key("carried", group, leaf) for leaf in leaves),
        writes=tuple(Key("carried_total", group, leaf) for leaf in leaves), chain=context.chain_of(node),
    )  # fmt: skip


def state_collectives(context: Context) -> dict[NodeId, StateCollective]:
    """All collectives on state, in plan order."""
    nodes = (n for n in context.dag.nodes.values() if isinstance(n, Collective))
    found = ((n.id, state_collective(context, n)) for n in nodes)
    return {node: c for node, c in found if c is not None}


def _gathered(context: Context, node: Collective, group: str, leaves: Iterable[int]) -> Iterable[Key]:
    kinds = {v.partition(" ")[0] for v in node.values}
    for leaf in leaves:
        if "parameters" in kinds:
            yield Key("state", group, leaf)
        if "gradient" in kinds:
            yield Key("gradient", group, leaf)
    if "state" in kinds:
        buckets = state_buckets(node)
        yield from (Key("optimizer", group, k) for k in context.optimizer_leaves(buckets))


def unreduced_key(context: Context, group: str, leaf: int, mb: int) -> Key:
    """Where the gradients of a leaf are summed on each replica until the end of their span of microbatches."""
    span = context.owned_leaf[leaf].span or 1
    return Key("unreduced", group, leaf, min((mb // span + 1) * span, context.num_microbatches) - 1)
