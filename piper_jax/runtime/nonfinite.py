"""The first array of a step that is not finite: of its inputs, or of a node that took finite ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from piper_jax.ir.fusion import programs
from piper_jax.ir.ids import NodeId
from piper_jax.lowering.context import Context
from piper_jax.lowering.executable import Lowering
from piper_jax.lowering.instruction import Instruction
from piper_jax.lowering.keys import Key
from piper_jax.processes.coordination import coordination
from piper_jax.runtime.node_run import Alone

SEARCH_LIMIT = 600.0
"""Seconds in which all processes must have run their nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Where it is.

    Attributes:
      what: ``parameter LEAF``, ``batch LEAF``, ``value NAME``, ``cotangent of NAME``, ``gradient LEAF`` and the like.
      node: that gave it, of one stage and microbatch; None for what a step begins with.
      path, source: module path and the user's line.
    """

    what: str
    node: NodeId | None = None
    path: str = ""
    source: str = ""

    @property
    def microbatch(self) -> int | None:
        return None if self.node is None else self.node.MB

    @property
    def stage(self) -> int | None:
        return None if self.node is None else self.node.PP

    def __str__(self) -> str:
        if self.node is None:
            return self.what
        return f"{self.node}: {self.what}" + (f", {self.path} at {self.source}" if self.source else "")


def first_nonfinite(
    lowering: Lowering, instructions: Iterable[Instruction], given: Mapping[Key, Any]
) -> NonFinite | None:
    """Runs every node as a program of its own, in dispatch order, and looks at all that it gives.

    Args:
      instructions: of the gradients of a step.
      given: state, batch, constants, and what else programs read.
    """
    context, alone, registers = lowering.context, Alone(lowering), dict(given)
    first: NonFinite | None = None
    for key, array in registers.items():
        if key.kind.removesuffix("_shard") in ("state", "batch", "shared") and not _is_finite(array):
            mb = f" of microbatch {_bad_microbatch(array)}" if key.kind == "batch" else ""
            first = first or NonFinite(what=_name(context, key) + mb)
    for instruction in instructions:
        if first is not None and context.process is None:
            return first  # of several processes each goes on, because others need what it sends
        nodes = instruction.nodes if instruction.role == "compute" else (None,)
        for node in nodes:
            single = instruction if node is None else alone.alone(node, with_sums=True)
            if any(key not in registers for key in single.reads):
                continue  # what puts the gradients together: they have been looked at
            results = single.call(*(registers[key] for key in single.reads))
            registers.update(zip(single.writes, results, strict=True))
            if node is None:
                continue
            bad = [key for key in single.writes if not _is_finite(registers[key])]
            if bad:
                op = context.dag.ops.get(node.op)
                path, source = (op.path, op.source) if op else ("", "")
                first = first or NonFinite(
                    what=_name(context, min(bad, key=_rank)), node=node, path=path, source=source
                )
    return first if context.process is None else _first_of_all(context, first)


def _first_of_all(context: Context, found: NonFinite | None) -> NonFinite | None:
    """What comes first in the plan's order among what all processes found."""
    several = coordination()
    assert several is not None
    order = {node: n for n, slot in enumerate(programs(context.dag)) for node in slot.nodes}
    place = -1 if found is None or found.node is None else order[found.node]
    words = None if found is None else [found.what, found.node, found.path, found.source]
    told = several.exchange("not finite", json.dumps([place, words]), SEARCH_LIMIT)
    known = [(n, words) for n, words in map(json.loads, told.values()) if words is not None]
    if not known:
        return None
    what, node, path, source = min(known, key=lambda one: one[0])[1]
    return NonFinite(what=what, node=None if node is None else NodeId(*node), path=path, source=source)


def _rank(key: Key) -> int:
    """What a node hands on says more than what it keeps."""
    order = ("value", "metric", "cotangent", "unreduced", "accumulator")
    kind = key.kind.removesuffix("_shard")
    return order.index(kind) if kind in order else len(order)


def _is_finite(array: Any) -> bool:
    """Whether all of an array that this process has is finite."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return True
    parts = [array] if array.is_fully_addressable else [shard.data for shard in array.addressable_shards]
    return all(bool(jnp.isfinite(part).all()) for part in parts)


def _bad_microbatch(array: Any) -> int:
    """Of an array ``[microbatches, ...]``, the first that is not finite in what this process has of it."""
    bad = np.zeros(array.shape[0], bool)
    for shard in array.addressable_shards:
        found = ~np.isfinite(np.asarray(shard.data))
        bad[shard.index[0]] |= found.reshape(len(found), -1).any(axis=1)
    return int(bad.argmax())


def _name(context: Context, key: Key) -> str:
    source, item = context.source, key.item
    match key.kind.removesuffix("_shard"):
        case "value":
            return f"value {context.value_of[item]}"
        case "cotangent":
            return f"cotangent of {context.value_of[item[0]]}"
        case "accumulator" | "unreduced" | "gradient":
            return f"gradient {source.state.leaves[item].path}"
        case "state":
            leaf = source.state.leaves[item]
            return f"{'parameter' if leaf.kind == 'trainable' else leaf.kind} {leaf.path}"
        case "batch" | "shared":
            return f"batch {source.batch.paths[item]}"
        case "metric":
            return "the loss" if isinstance(item, tuple) else f"metric {context.program.metrics[item].path or 'aux'}"
        case kind:
            return f"{kind} {item}"
