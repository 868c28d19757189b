"""An expert region on the experts of one device: the same equations, each on its part of the arrays.

Each value of a region is followed with the dimension on which it has the experts, or rows that belong to experts.
Equations that keep these apart are evaluated on the device's own; one that mixes them is refused, so no collective can
hide in a region. What does not come from any expert (a constant mask) is computed whole, and cut where it meets one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from piper_jax import _jax_compat
from piper_jax.errors import PlanError
from piper_jax.tracing.constraints import NAME as CONSTRAINT
from piper_jax.tracing.elementwise import ELEMENTWISE
from piper_jax.tracing.flat import Flat, FlatEqn, flatten, read

EXPERT_AXIS = "expert"


@dataclass(frozen=True, slots=True)
class Part:
    """Of dimension ``dim``, which has ``whole`` entries, a device has ``local``: its experts, or rows of these."""

    dim: int
    whole: int
    local: int
    rows: bool = False

    def at(self, dim: int) -> Part:
        return Part(dim, self.whole, self.local, self.rows)


Parts = Sequence[Part | None]
Results = tuple[Sequence[Any], Parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalExperts:
    """Evaluates the equations of ``flat``, a program that holds an expert region, on the experts of one device.

    Attributes:
      place: the operation, for messages.
      uniform: for values that are whole, the dimensions along which they repeat one entry.
    """

    place: str
    flat: Flat
    parts: dict[int, Part]
    uniform: dict[int, frozenset[int]]

    @classmethod
    def of(cls, place: str, flat: Flat, parts: Mapping[int, Part]) -> LocalExperts:
        """With the parts of the values that are given; those of results are added."""
        return cls(place=place, flat=flat, parts=dict(parts), uniform={})

    def run(self, eqns: Iterable[FlatEqn], env: dict[int, Any]) -> None:
        """Evaluates ``eqns`` in ``env``.

        Raises:
          PlanError: an equation that mixes experts, or one that nobody taught this class.
        """
        for eqn in eqns:
            known = [self.parts.get(a) if isinstance(a, int) else None for a in eqn.inputs]
            values = [read(a, env) for a in eqn.inputs]
            if any(known):
                results, found = self._evaluate(_Equation(self, eqn, known), values)
                self.parts.update((o, part) for o, part in zip(eqn.outputs, found, strict=True) if part is not None)
            else:
                results = _jax_compat.bind(eqn.eqn, values)
                if eqn.name == "broadcast_in_dim":
                    kept = set(eqn.eqn.params["broadcast_dimensions"])
                    self.uniform[eqn.outputs[0]] = frozenset(range(len(eqn.eqn.params["shape"]))) - kept
            env.update(zip(eqn.outputs, results, strict=True))

    def _evaluate(self, eqn: _Equation, values: Sequence[Any]) -> Results:
        if eqn.name in ELEMENTWISE:
            return eqn.elementwise(values)
        if eqn.name.startswith("reduce_") or eqn.name in ("argmax", "argmin"):
            return eqn.reduction(values)
        rule = _RULES.get(eqn.name)
        if rule is None:
            raise eqn.refused("is not understood in a region whose experts are divided")
        return rule(eqn, values)


@dataclass(frozen=True, slots=True)
class _Equation:
    """One equation with the parts of its operands, some of which are not whole."""

    region: LocalExperts
    flat: FlatEqn
    parts: Parts

    @property
    def name(self) -> str:
        return self.flat.name

    @property
    def params(self) -> Mapping[str, Any]:
        return self.flat.eqn.params

    def shape(self, operand: int) -> tuple[int, ...]:
        """The whole shape of an operand."""
        atom = self.flat.inputs[operand]
        return tuple((self.region.flat.avals[atom] if isinstance(atom, int) else atom.aval).shape)

    def bind(self, values: Sequence[Any], **changed: Any) -> Sequence[Any]:
        return _jax_compat.bind(self.flat.eqn, values, **changed)

    def _line_before(self) -> str:
        """The user's line nearest before an equation of which JAX kept none, such as of its own jitted functions."""
        before = itertools.takewhile(lambda eqn: eqn is not self.flat, self.region.flat.eqns)
        return next(filter(None, (_jax_compat.user_line(eqn.eqn) for eqn in reversed(tuple(before)))), "its region")

    def refused(self, why: str) -> PlanError:
        at = _jax_compat.user_line(self.flat.eqn) or self.flat.path or self._line_before()
        return PlanError(
            f"compile: `{self.name}` at {at} {why}, so {self.region.place} cannot be sharded.",
            help="keep what belongs to each expert apart inside the region, or use expert_parallel=1.",
        )

    def local_shape(self, shape: Sequence[int], part: Part) -> tuple[int, ...]:
        """A whole shape with only this device's entries on the dimension of ``part``."""
        if shape[part.dim] != part.whole:
            raise self.refused("takes some of the experts")
        return tuple(part.local if d == part.dim else n for d, n in enumerate(shape))

    def apart(self, parts: Parts, *mixed: int) -> Part:
        """The one part that operands have, whose dimension is none of ``mixed``."""
        found = {part for part in parts if part is not None}
        if len(found) > 1 or any(part.dim in mixed for part in found):
            raise self.refused("mixes experts")
        return found.pop()

    def own(self, operand: int, value: Any, part: Part) -> Any:
        """This device's entries of an operand that is whole; one that is the same for all of them stays as it is."""
        if self.shape(operand)[part.dim] == 1 < part.whole:
            return value
        if not part.rows:
            start = jax.lax.axis_index(EXPERT_AXIS) * part.local
            return jax.lax.dynamic_slice_in_dim(value, start, part.local, part.dim)
        atom = self.flat.inputs[operand]
        if isinstance(atom, int) and part.dim in self.region.uniform.get(atom, ()):
            one = jax.lax.slice_in_dim(value, 0, 1, axis=part.dim)
            return jax.numpy.broadcast_to(one, self.local_shape(value.shape, part))
        raise self.refused("has a value of its own for each row")

    def together(self, values: Sequence[Any], part: Part) -> list[Any]:
        """Operands of one shape (or scalars), those that are whole cut to this device's entries."""
        return [self.own(k, v, part) if self.parts[k] is None and self.shape(k) else v for k, v in enumerate(values)]

    # -- kinds of equations ----------------------------------------------------------------------------
    def elementwise(self, values: Sequence[Any]) -> Results:
        part = self.apart(self.parts)
        results = self.bind(self.together(values, part))
        return results, [part] * len(results)

    def along(self, *axes: int, values: Sequence[Any]) -> Results:
        """All operands of one shape; something happens along ``axes``."""
        self.apart(self.parts, *axes)
        return self.elementwise(values)

    def reduction(self, values: Sequence[Any]) -> Results:
        axes = tuple(self.params["axes"])
        part = self.apart(self.parts, *axes)
        results = self.bind(self.together(values, part))
        return results, [part.at(part.dim - sum(a < part.dim for a in axes))] * len(results)

    def transpose(self, values: Sequence[Any]) -> Results:
        part = self.apart(self.parts)
        return self.bind(values), [part.at(self.params["permutation"].index(part.dim))]

    def broadcast(self, values: Sequence[Any]) -> Results:
        part = self.apart(self.parts[:1])
        part = part.at(self.params["broadcast_dimensions"][part.dim])
        return self.bind(values, shape=self.local_shape(self.params["shape"], part)), [part]

    def reshape(self, values: Sequence[Any]) -> Results:
        part, new = self.apart(self.parts[:1]), self.params["new_sizes"]
        before = math.prod(self.shape(0)[: part.dim])
        same = (d for d, n in enumerate(new) if math.prod(new[:d]) == before and n == part.whole)
        if (dim := next(same, None)) is None:
            raise self.refused("merges the dimension of the experts with another")
        return self.bind(values, new_sizes=self.local_shape(new, part.at(dim))), [part.at(dim)]

    def squeeze(self, values: Sequence[Any]) -> Results:
        gone = self.params["dimensions"]
        part = self.apart(self.parts, *gone)
        return self.bind(values), [part.at(part.dim - sum(d < part.dim for d in gone))]

    def concatenate(self, values: Sequence[Any]) -> Results:
        return self.along(self.params["dimension"], values=values)

    def cumulative(self, values: Sequence[Any]) -> Results:
        return self.along(self.params["axis"], values=values)

    def reverse(self, values: Sequence[Any]) -> Results:
        return self.along(*self.params["dimensions"], values=values)

    def split(self, values: Sequence[Any]) -> Results:
        part = self.apart(self.parts, self.params["axis"])
        results = self.bind(values)
        return results, [part] * len(results)

    def pad(self, values: Sequence[Any]) -> Results:
        part = self.apart(self.parts[:1])
        if self.params["padding_config"][part.dim] != (0, 0, 0):
            raise self.refused("mixes experts")
        return self.bind(values), [part]

    def slice(self, values: Sequence[Any]) -> Results:
        part, strides = self.apart(self.parts), self.params["strides"]
        if self.params["start_indices"][part.dim] or (strides and strides[part.dim] != 1):
            raise self.refused("takes some of the experts")
        return self.bind(values, limit_indices=self.local_shape(self.params["limit_indices"], part)), [part]

    def dynamic_slice(self, values: Sequence[Any]) -> Results:
        part = self.apart(self.parts[:1])
        return self.bind(values, slice_sizes=self.local_shape(self.params["slice_sizes"], part)), [part]

    def dot_general(self, values: Sequence[Any]) -> Results:
        contracting, batch = self.params["dimension_numbers"]
        sides = {s: part for s, part in enumerate(self.parts) if part is not None}
        if any(part.dim in contracting[s] for s, part in sides.items()):
            raise self.refused("mixes experts")
        positions = {batch[s].index(p.dim) if p.dim in batch[s] else None for s, p in sides.items()}
        position = positions.pop()
        if positions or (position is None and len(sides) == 2):
            raise self.refused("mixes experts")
        side, part = next(iter(sides.items()))
        if position is not None:
            cut = [v if s in sides else self.own(s, v, part.at(batch[s][position])) for s, v in enumerate(values)]
            return self.bind(cut), [part.at(position)]
        return self.bind(values), [part.at(len(batch[0]) + self._free(contracting, batch).index((side, part.dim)))]

    def _free(self, contracting: Any, batch: Any) -> list[tuple[int, int]]:
        """Operand and dimension of those of the result that follow the batch dimensions."""
        bound = [{*contracting[s], *batch[s]} for s in (0, 1)]
        return [(s, d) for s in (0, 1) for d in range(len(self.shape(s))) if d not in bound[s]]

    def ragged_dot(self, values: Sequence[Any]) -> Results:
        """Rows that belong to experts, times the matrix of each."""
        numbers, (rows, weights, sizes) = self.params["ragged_dot_dimension_numbers"], self.parts
        contracting, batch = numbers.dot_dimension_numbers
        ragged, grouped = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
        if rows is None or sizes is None or not rows.rows or (rows.dim,) != ragged or len(grouped) != 1:
            raise self.refused("mixes experts")
        values = list(values)
        if weights is None:
            values[1] = self.own(1, values[1], sizes.at(grouped[0]))
        elif weights != sizes.at(grouped[0]):
            raise self.refused("mixes experts")
        return self.bind(values), [rows.at(len(batch[0]) + self._free(contracting, batch).index((0, rows.dim)))]

    def custom_jvp(self, values: Sequence[Any]) -> Results:
        """The function and its own derivative, both on this device's experts."""
        primal, derivative = (flatten(closed) for closed in _jax_compat.custom_jvp_programs(self.flat.eqn))
        place, parts = self.region.place, self.parts

        def run(flat: Flat, operands: Sequence[Any], known: Parts) -> tuple[list[Any], list[Part | None]]:
            env = {**flat.consts, **dict(zip(flat.inputs, operands, strict=True))}
            given = {v: part for v, part in zip(flat.inputs, known, strict=True) if part is not None}
            inside = LocalExperts.of(place, flat, given)
            inside.run(flat.eqns, env)
            found = [inside.parts.get(a) if isinstance(a, int) else None for a in flat.outputs]
            return [read(a, env) for a in flat.outputs], found

        found: list[Part | None] = []
        jax.eval_shape(lambda: found.extend(run(primal, values, parts)[1]))
        function = jax.custom_jvp(lambda *operands: run(primal, operands, parts)[0])

        @function.defjvp
        def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            both, known = run(derivative, [*primals, *tangents], [*parts, *parts])
            half = len(both) // 2
            if known[half:] != known[:half]:
                raise self.refused("has a derivative without experts")
            return both[:half], both[half:]

        return function(*values), found


_Rule = Callable[[_Equation, Sequence[Any]], Results]
_RULES: Mapping[str, _Rule] = {
    "transpose": _Equation.transpose, "broadcast_in_dim": _Equation.broadcast, "reshape": _Equation.reshape,
    "squeeze": _Equation.squeeze, "concatenate": _Equation.concatenate, "cumsum": _Equation.cumulative,
    "cumprod": _Equation.cumulative, "cummax": _Equation.cumulative, "cummin": _Equation.cumulative,
    "cumlogsumexp": _Equation.cumulative, "rev": _Equation.reverse, "pad": _Equation.pad, "slice": _Equation.slice,
    "dynamic_slice": _Equation.dynamic_slice, "split": _Equation.split, "sort": _Equation.concatenate,
    "dot_general": _Equation.dot_general, "ragged_dot_general": _Equation.ragged_dot,
    "ragged_dot": _Equation.ragged_dot, "custom_jvp_call": _Equation.custom_jvp, CONSTRAINT: _Equation.elementwise,
}  # fmt: skip
