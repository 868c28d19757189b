"""Finds the first node of a plan whose values differ from the one-device program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Compute
from piper_jax.lowering.context import Context
from piper_jax.lowering.instruction import Instruction
from piper_jax.lowering.keys import Key
from piper_jax.runtime.whole_program import WholeProgram, at_64_bits, relative_difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A value that a plan computes differently.

    Attributes:
      node: the node that gave it.  what: ``value NAME``, ``cotangent of NAME`` or ``gradient LEAF``.
      path, source: module path and the user's line.
      error: largest absolute difference over the largest absolute value of the reference.
    """

    node: NodeId
    what: str
    path: str
    source: str
    error: float

    def __str__(self) -> str:
        return f"{self.node}: {self.what} differs by {self.error:.2e} (relative), {self.path} at {self.source}"


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """Compares kept registers with the whole program on one device, one microbatch after another."""

    context: Context
    registers: Mapping[Key, Any]
    rtol: float

    def first(self, instructions: Iterable[Instruction]) -> Difference | None:
        """The first difference in dispatch order, gradients of leaves last."""
        whole = WholeProgram(context=self.context, registers=self.registers)
        found = [whole.run(m) for m in range(self.context.num_microbatches)]
        values = [f.values for f in found]
        cotangents = [f.cotangents for f in found]
        given: set[Key] = set()
        for instruction in instructions:
            for node in instruction.nodes:
                if isinstance(self.context.dag.nodes.get(node), Compute):
                    given.update(k for k in instruction.writes if k.kind == "cotangent")
                    if (difference := self._node(node, values, cotangents, given)) is not None:
                        return difference
        return self._gradients([f.gradients for f in found])

    def _node(self, node: NodeId, values: Any, cotangents: Any, given: set[Key]) -> Difference | None:
        context, mb = self.context, node.MB or 0
        chunk, group = context.chunk_of[node.op], str(context.dag.nodes[node].group)
        if node.PASS == "F":
            keys = {v: Key("value", group, v, mb) for v in chunk.exports}
            found = (
                self._compare(node, f"value {context.value_of[v]}", self.registers[key], values[mb][v])
                for v, key in keys.items()
                if key in self.registers
            )
            return next(filter(None, found), None)
        for v in chunk.diff_externals if node.PASS in ("B", "BI") else ():
            parts = [self._any_group("cotangent", (v, giver), mb, given) for giver in context.cotangent_givers[v]]
            if all(p is not None for p in parts):
                total = sum(np.asarray(p) for p in parts)
                difference = self._compare(node, f"cotangent of {context.value_of[v]}", total, cotangents[mb][v])
                if difference is not None:
                    return difference
        return None

    def _any_group(self, kind: Any, item: Any, mb: int, given: set[Key]) -> Any:
        return next((self.registers[k] for k in given if (k.kind, k.item, k.mb) == (kind, item, mb)), None)

    def _gradients(self, per_microbatch: Sequence[Mapping[int, Any]]) -> Difference | None:
        context = self.context
        owner = {leaf: g for g, leaves in reversed(context.group_leaves.items()) for leaf in leaves}
        for leaf in context.source.state.trainable:
            key = Key("gradient", owner[leaf], leaf)
            if key not in self.registers:
                continue
            expected = sum(at_64_bits(g[leaf]) for g in per_microbatch)
            op = next((o for o, c in context.chunk_of.items() if leaf in c.diff_state), None)
            node = self._last_backward(op)
            what = f"gradient {context.source.state.leaves[leaf].path}"
            if (difference := self._compare(node, what, self.registers[key], expected)) is not None:
                return difference
        return None

    def _last_backward(self, op: str | None) -> NodeId:
        """The node that adds the last part of an operation's gradients."""
        found = [n for n in self.context.dag.nodes if n.op == op and n.PASS in ("B", "BW")]
        return found[-1] if found else NodeId(op or "", "B")

    def _compare(self, node: NodeId, what: str, planned: Any, expected: Any) -> Difference | None:
        error = relative_difference(planned, expected)
        if error <= self.rtol:
            return None
        op = self.context.dag.ops.get(node.op)
        path, source = (op.path, op.source) if op else ("", "")
        return Difference(node=node, what=what, path=path, source=source, error=error)
