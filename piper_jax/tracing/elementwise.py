"""Which buckets an optimizer updates element by element, so that ZeRO may update flat shards of them.

A shard is an equal part of a leaf that is flattened and padded. Equations that work element by element give the same on
shards as on whole leaves; a sum over a whole leaf gives a part, which is added up where values are exchanged between
rounds. Everything else (a row mean, a matrix product, a norm that scales its own leaf) needs whole leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from piper_jax.tracing.flat import Flat, FlatEqn

Combine = Literal["sum", "max", "min", "and", "or"]
REDUCTIONS: Mapping[str, Combine] = {
    "reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_and": "and", "reduce_or": "or",
}  # fmt: skip
ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type", "copy", "cos", "cosh",
    "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "nextafter", "not", "or", "pow", "real", "rem", "reduce_precision", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub",
    "tan", "tanh", "xor",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """What an update may do shard by shard.

    Attributes:
      buckets: those updated element by element.
      shards: values of these buckets that shards stand for.
      combine: values of these buckets that are exchanged, and how their parts are put together.
    """

    buckets: frozenset[int]
    shards: frozenset[int]
    combine: Mapping[int, Combine]


def elementwise(flat: Flat, owner: Sequence[int | None], mixed: int) -> Elementwise:
    """The analysis of an optimizer program.

    Args:
      flat: gradients, parameters and optimizer leaves -> new parameters and leaves.
      owner: the bucket of each value, None, or ``mixed``.
    """
    whole: set[int] = set()
    found = _Analysis(flat, owner, mixed, whole)
    for eqn in flat.eqns:
        found.visit(eqn)
    for atom in flat.outputs:
        if isinstance(atom, int) and atom in found.parts:
            found.needs_whole(atom)
    kept = frozenset(o for o in owner if o is not None and o != mixed) - whole
    return Elementwise(
        buckets=kept,
        shards=frozenset(v for v in found.shards if owner[v] in kept),
        combine={v: c for v, c in found.parts.items() if owner[v] in kept},
    )


class _Analysis:
    def __init__(self, flat: Flat, owner: Sequence[int | None], mixed: int, whole: set[int]):
        self.flat, self.owner, self.mixed, self.whole = flat, owner, mixed, whole
        self.shards = {v for v in flat.inputs if owner[v] not in (None, mixed)}
        self.parts: dict[int, Combine] = {}

    def needs_whole(self, value: int) -> None:
        bucket = self.owner[value]
        if bucket is not None:
            self.whole.add(bucket)

    def visit(self, eqn: FlatEqn) -> None:
        sharded = [a for a in eqn.reads() if a in self.shards]
        parts = [a for a in eqn.reads() if a in self.parts]
        if self.owner[eqn.outputs[0]] == self.mixed:
            for value in sharded:
                if self.flat.avals[value].size != 1:
                    self.needs_whole(value)
                else:
                    self.parts[value] = "or" if str(self.flat.avals[value].dtype) == "bool" else "sum"
        elif parts and not set(parts) <= self.shards:
            for value in parts:
                self.needs_whole(value)
        elif sharded and (combine := self._full_reduction(eqn)) is not None:
            self.parts[eqn.outputs[0]] = combine
        elif sharded:
            if not self._is_elementwise(eqn):
                self.needs_whole(sharded[0])
            self.shards.update(eqn.outputs)

    def _shape(self, atom: Any) -> tuple[int, ...]:
        return tuple((self.flat.avals[atom] if isinstance(atom, int) else atom.aval).shape)

    def _full_reduction(self, eqn: FlatEqn) -> Combine | None:
        if eqn.name in REDUCTIONS and len(eqn.eqn.params["axes"]) == len(self._shape(eqn.inputs[0])):
            return REDUCTIONS[eqn.name]
        return None

    def _is_elementwise(self, eqn: FlatEqn) -> bool:
        """All arrays have one shape; a scalar leaf meets scalars only, for its shards are padded vectors."""
        shape = self._shape(eqn.outputs[0])
        shapes = {self._shape(a) for a in eqn.inputs} | {self._shape(o) for o in eqn.outputs}
        of_shards = {self._shape(a) for a in eqn.reads() if a in self.shards}
        return eqn.name in ELEMENTWISE and shapes <= {shape, ()} and of_shards == {shape}
