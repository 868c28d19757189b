"""Flat equations on one replica of a group: means over its replicas, and sharding constraints, at any depth.

What lies in a loop or a branch is traced once more inside the program of the group's devices, since a mean over
replicas there is a collective, and a constraint one of their mesh. Derivatives are taken before: so a checkpoint, or a
function with a derivative of its own, is no more than what it computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core

from piper_jax import _jax_compat
from piper_jax.tracing.constraints import NAME as CONSTRAINT
from piper_jax.tracing.constraints import constrained
from piper_jax.tracing.flat import REPLICA_MEAN, Flat, FlatEqn, flatten, holds, inner_jaxprs, read


@dataclass(frozen=True, slots=True)
class Replica:
    """Evaluates flat equations.

    Attributes:
      axes: mesh axes over which ``mean_over_replicas`` is taken.
      divided: names of dimensions that the tensor axis divides; None leaves constraints out.
      final: no derivative is taken of what is evaluated, so functions with one of their own do not need it.
    """

    axes: tuple[str, ...]
    divided: frozenset[str] | None = frozenset()
    final: bool = True

    def run(self, eqns: Iterable[FlatEqn], env: dict[int, Any]) -> None:
        """Adds the results of ``eqns`` to ``env``."""
        for eqn in eqns:
            values = [read(a, env) for a in eqn.inputs]
            env.update(zip(eqn.outputs, self._results(eqn, values), strict=True))

    def _results(self, eqn: FlatEqn, values: Sequence[Any]) -> Sequence[Any]:
        if eqn.is_replica_mean:
            return [jax.lax.pmean(v, self.axes) if self.axes else v for v in values]
        if eqn.name == CONSTRAINT:
            sharding = eqn.eqn.params["sharding"]
            return values if self.divided is None else [constrained(values[0], sharding, self.divided)]
        inner = inner_jaxprs(eqn.eqn.params)
        if not inner or not (_jax_compat.has_mesh(eqn.eqn) or any(map(is_placed, inner))):
            return _jax_compat.bind(eqn.eqn, values)
        if (called := _jax_compat.evaluated(eqn.eqn, rules=self.final)) is not None:
            return self._call(flatten(called), values)
        inside = replace(self, divided=None) if eqn.name == "cond" else self  # XLA wants results of branches alike
        return _jax_compat.bind(eqn.eqn, values, **{name: inside._here(p) for name, p in eqn.eqn.params.items()})

    def _call(self, flat: Flat, values: Sequence[Any]) -> list[Any]:
        env = {**flat.consts, **dict(zip(flat.inputs, values, strict=True))}
        self.run(flat.eqns, env)
        return [read(a, env) for a in flat.outputs]

    def _here(self, param: Any) -> Any:
        """A parameter of an equation with the programs in it traced on this replica."""

        def traced(leaf: Any) -> Any:
            if not _is_program(leaf):
                return leaf
            flat = flatten(leaf)
            specs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in leaf.in_avals]
            return jax.make_jaxpr(lambda *values: self._call(flat, values))(*specs)

        held = jax.tree.leaves(param, is_leaf=_is_program)
        return jax.tree.map(traced, param, is_leaf=_is_program) if any(map(_is_program, held)) else param


def is_placed(jaxpr: Any) -> bool:
    """Whether a program holds, at any depth, what depends on the devices that it runs on."""
    return any(holds(eqn, REPLICA_MEAN, CONSTRAINT) for eqn in jaxpr.eqns)


def _is_program(value: Any) -> bool:
    return isinstance(value, core.ClosedJaxpr)
