"""Finds the first node of a plan whose values differ from the one-device program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Compute
from piper_jax.lowering.context import Context
from piper_jax.lowering.instruction import Instruction
from piper_jax.lowering.keys import Key
from piper_jax.tracing.flat import FlatEqn, read

_AXIS = "piper_replica"


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
    """Compares kept registers with a reference that runs the traced program whole, one microbatch after another.

    The reference knows no chunks: cotangents of values between stages are its derivatives by a zero added to them.
    """

    context: Context
    registers: Mapping[Key, Any]
    rtol: float

    def first(self, instructions: Iterable[Instruction]) -> Difference | None:
        """The first difference in dispatch order, gradients of leaves last."""
        found = [self._reference(m) for m in range(self.context.num_microbatches)]
        values = [f[0] for f in found]
        cotangents = [f[1] for f in found]
        given: set[Key] = set()
        for instruction in instructions:
            for node in instruction.nodes:
                if isinstance(self.context.dag.nodes[node], Compute):
                    given.update(k for k in instruction.writes if k.kind == "cotangent")
                    if (difference := self._node(node, values, cotangents, given)) is not None:
                        return difference
        return self._gradients([f[2] for f in found])

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

    def _gradients(self, per_microbatch: Sequence[Sequence[Any]]) -> Difference | None:
        context = self.context
        owner = {leaf: g for g, leaves in reversed(context.group_leaves.items()) for leaf in leaves}
        for position, leaf in enumerate(context.source.state.trainable):
            key = Key("gradient", owner[leaf], leaf)
            if key not in self.registers:
                continue
            expected = sum(np.asarray(g[position], np.float64) for g in per_microbatch)
            op = next((o for o, c in context.chunk_of.items() if leaf in c.diff_state), None)
            node = NodeId(op or "", "B", PP=context.dag.ops[op].PP if op else None)
            what = f"gradient {context.source.state.leaves[leaf].path}"
            if (difference := self._compare(node, what, self.registers[key], expected)) is not None:
                return difference
        return None

    def _compare(self, node: NodeId, what: str, planned: Any, expected: Any) -> Difference | None:
        a, b = np.asarray(planned), np.asarray(expected)
        a, b = a.astype(np.float64), b.astype(np.float64)
        error = float(np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(b), initial=0.0), 1e-30))
        if error <= self.rtol:
            return None
        op = self.context.dag.ops.get(node.op)
        path, source = (op.path, op.source) if op else ("", "")
        return Difference(node=node, what=what, path=path, source=source, error=error)

    def _reference(self, m: int) -> tuple[dict[int, Any], dict[int, Any], list[Any]]:
        """Values between stages, their cotangents, and this microbatch's share of the gradients."""
        context, program = self.context, self.context.program
        flat, replicas = program.flat, context.replicas
        trained = [self._state(leaf) for leaf in context.source.state.trainable]
        exports = sorted({v for c in context.chunk_of.values() for v in c.exports})
        smooth = sorted({v for c in context.chunk_of.values() for v in c.diff_exports})
        rows, keys, eqns = self._rows(m), self._keys(m), self._eqns_on_nudged(smooth)

        def one(trained_: Sequence[Any], nudges: Sequence[Any], row: Sequence[Any], key: Any) -> tuple[Any, list[Any]]:
            state = [self._state(i) for i in range(program.num_state)]
            for i, value in zip(context.source.state.trainable, trained_, strict=True):
                state[i] = value
            env = {**flat.consts, **dict(zip(flat.inputs, [*state, *row, key], strict=True))}
            nudge = dict(zip(smooth, nudges, strict=True))
            for eqn in eqns:
                flat.run([eqn], env, (_AXIS,))
                env.update({-1 - o: env[o] + nudge[o] for o in eqn.outputs if o in nudge})
            seeds = {"loss": 1.0 / context.num_slices, "extra": 1.0 / context.num_slices, "total": self._seed()}
            objective = sum(seeds[k] * jnp.asarray(read(a, env), jnp.result_type(float)) for k, a in program.terms)
            return objective, [env[v] for v in exports]

        def whole(trained_: Sequence[Any], nudges: Sequence[Any]) -> tuple[Any, list[Any]]:
            mapped = jax.vmap(one, in_axes=(None, 0, 0, 0), axis_name=_AXIS)
            objectives, values = mapped(trained_, nudges, rows, keys)
            return objectives.sum(), values

        zeros = [jnp.zeros((replicas, *flat.avals[v].shape), flat.avals[v].dtype) for v in smooth]
        (_, values), (gradients, cotangents) = jax.jit(jax.value_and_grad(whole, (0, 1), has_aux=True))(trained, zeros)
        return dict(zip(exports, values, strict=True)), dict(zip(smooth, cotangents, strict=True)), gradients

    def _eqns_on_nudged(self, smooth: Sequence[int]) -> list[FlatEqn]:
        """The program's equations; value ``v`` of another chunk is read as ``-1 - v``, to which a zero is added."""
        chunk_of_unit = {u: name for name, op in self.context.dag.ops.items() for u in op.units}
        home = {v: name for name, chunk in self.context.chunk_of.items() for v in chunk.exports}
        eqns = []
        for eqn, unit in zip(self.context.program.flat.eqns, self.context.source.units, strict=True):
            here = chunk_of_unit.get(unit) if unit is not None else None
            inputs = tuple(
                -1 - a if isinstance(a, int) and a in smooth and here is not None and home[a] != here else a
                for a in eqn.inputs
            )
            eqns.append(replace(eqn, inputs=inputs))
        return eqns

    def _local(self, array: Any) -> Any:
        return jax.device_put(array, jax.devices()[0]) if isinstance(array, jax.Array) else array

    def _state(self, leaf: int) -> Any:
        key = next(k for k in self.registers if k.kind == "state" and k.item == leaf)
        return self._local(self.registers[key])

    def _seed(self) -> Any:
        return next((self._local(v) for k, v in self.registers.items() if k.kind == "seed"), 1.0)

    def _rows(self, m: int) -> list[Any]:
        rows = []
        for leaf, known in enumerate(self.context.source.batch.specs):
            array = next(
                (self.registers[k] for k in self.registers if k.kind in ("batch", "shared") and k.item == leaf), None
            )
            if array is None:
                size = self.context.batch_size // self.context.num_slices
                shape = (self.context.replicas, size, *known.shape[1:]) if known.shape else (self.context.replicas,)
                rows.append(jnp.zeros(shape, known.dtype))
            else:
                local = self._local(array)
                rows.append(local[m] if known.shape else jnp.broadcast_to(local, (self.context.replicas,)))
        return rows

    def _keys(self, m: int) -> Any:
        registers = {k.kind: self._local(v) for k, v in self.registers.items() if k.kind in ("key", "step")}
        step_key = jax.random.fold_in(registers["key"], registers["step"])
        slices = m * self.context.replicas + jnp.arange(self.context.replicas)
        return jax.vmap(lambda s: jax.random.fold_in(step_key, s))(slices)
