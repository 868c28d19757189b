"""Arrays in pieces: one for each layer of a stack, and the equations that work on every piece by itself.

An equation on a stack ``[layers, ...]`` that mixes no layers is the same equation on each piece ``[...]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from piper_jax.tracing.elementwise import ELEMENTWISE, REDUCTIONS
from piper_jax.tracing.flat import Flat

Dimension = TypeVar("Dimension")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Division:
    """An array as ``count`` pieces along ``dim``, which they do not have any more."""

    dim: int
    count: int

    def piece_shape(self, shape: Sequence[Dimension]) -> tuple[Dimension, ...]:
        """The shape of each piece of an array of ``shape``; or what else there is of each dimension."""
        return _without(shape, self.dim)

    def split(self, value: Any) -> list[Any]:
        """The pieces of an array."""
        array = jnp.asarray(value)
        return [jax.lax.dynamic_index_in_dim(array, k, self.dim, keepdims=False) for k in range(self.count)]

    def join(self, pieces: Sequence[Any]) -> Any:
        """The array of these pieces, or its shape and dtype."""
        first = pieces[0]
        if isinstance(first, jax.ShapeDtypeStruct):
            return first.update(shape=(*first.shape[: self.dim], self.count, *first.shape[self.dim :]))
        return jnp.stack([jnp.asarray(p) for p in pieces], axis=self.dim)


def split_all(values: Sequence[Any], divisions: Sequence[Division | None]) -> list[Any]:
    """Whole arrays -> their pieces in order; arrays without a division as they are."""
    pairs = zip(values, divisions, strict=True)
    return [piece for value, found in pairs for piece in (found.split(value) if found else (value,))]


def join_all(pieces: Sequence[Any], divisions: Sequence[Division | None]) -> list[Any]:
    """The inverse of ``split_all``."""
    pending = iter(pieces)
    taken = [[next(pending) for _ in range(found.count if found else 1)] for found in divisions]
    return [found.join(own) if found else own[0] for own, found in zip(taken, divisions, strict=True)]


@dataclass(frozen=True, slots=True)
class Piecewise:
    """How an equation works on pieces.

    Attributes:
      dims: of each operand the dimension along which it is in pieces, None where every piece takes it whole.
      out: that of the result.
      changed: parameters that differ on a piece.
    """

    dims: tuple[int | None, ...]
    out: int
    changed: Mapping[str, Any]


def piecewise(eqn: Any, dims: Sequence[int | None]) -> Piecewise | None:
    """How an equation works piece by piece, if it mixes no pieces.

    Args:
      eqn: an equation with one result.
      dims: of each operand the dimension along which it is in pieces, None for whole arrays.
    """
    if len(eqn.outvars) != 1:
        return None
    shapes = [tuple(v.aval.shape) for v in eqn.invars]
    shape, name = tuple(eqn.outvars[0].aval.shape), eqn.primitive.name
    first = next(k for k, d in enumerate(dims) if d is not None)
    dim = dims[first]
    assert dim is not None
    if name in ELEMENTWISE:
        fits = all(s in (shape, ()) for s in shapes) and {d for d in dims if d is not None} == {dim}
        return Piecewise(tuple(dim if s == shape else None for s in shapes), dim, {}) if fits else None
    if name == "dot_general":
        return _batched(eqn, dims)
    if len(eqn.invars) != 1 or (found := _moved(eqn, shapes[0], shape, dim)) is None:
        return None
    out, changed = found
    return Piecewise((dim,), out, changed)


def _moved(eqn: Any, before: tuple[int, ...], after: tuple[int, ...], dim: int) -> tuple[int, Mapping[str, Any]] | None:
    """Where a dimension of the only operand is in the result, and what differs without it."""
    params = eqn.params
    match eqn.primitive.name:
        case "transpose":
            order = params["permutation"]
            return order.index(dim), {"permutation": _shifted(order, dim)}
        case "broadcast_in_dim":
            places = params["broadcast_dimensions"]
            out, rest = places[dim], _shifted(_without(places, dim), places[dim])
            changed = {"shape": _without(after, out), "broadcast_dimensions": rest}
            return (out, changed) if after[out] == before[dim] else None
        case "reshape" if params.get("dimensions") is None:
            same = (k for k, n in enumerate(after) if n == before[dim])
            found = next((k for k in same if math.prod(after[:k]) == math.prod(before[:dim])), None)
            return None if found is None else (found, {"new_sizes": _without(after, found)})
        case "squeeze" if dim not in params["dimensions"]:
            return _before(params["dimensions"], dim), {"dimensions": _shifted(params["dimensions"], dim)}
        case "slice" if after[dim] == before[dim]:
            names = ("start_indices", "limit_indices", "strides")
            return dim, {n: params[n] if params[n] is None else _without(params[n], dim) for n in names}
        case name if name.startswith("reduce_") and "axes" in params and dim not in params["axes"]:
            return _before(params["axes"], dim), {"axes": _shifted(params["axes"], dim)}
        case _:
            return None


def _batched(eqn: Any, dims: Sequence[int | None]) -> Piecewise | None:
    """Matrix products with the pieces on a batch dimension."""
    contract, batch = eqn.params["dimension_numbers"]
    places = {own.index(d) if d in own else None for own, d in zip(batch, dims, strict=True) if d is not None}
    place = places.pop()
    if places or place is None:
        return None
    along = tuple(own[place] for own in batch)
    rest = tuple(_shifted(_without(own, place), d) for own, d in zip(batch, along, strict=True))
    shifted = tuple(_shifted(own, d) for own, d in zip(contract, along, strict=True))
    return Piecewise(along, place, {"dimension_numbers": (shifted, rest)})


def divisions_through(flat: Flat, inputs: Sequence[Division | None]) -> list[Division | None]:
    """How the outputs of a program are divided if its inputs are: what meets pieces is in pieces, if it can be."""
    known = {v: d for v, d in zip(flat.inputs, inputs, strict=True) if d is not None}
    for eqn in flat.eqns:
        given = [known.get(a) if isinstance(a, int) else None for a in eqn.inputs]
        counts = {d.count for d in given if d is not None}
        if len(counts) == 1 and (found := piecewise(eqn.eqn, [d and d.dim for d in given])) is not None:
            known[eqn.outputs[0]] = Division(found.out, counts.pop())
    return [known.get(a) if isinstance(a, int) else None for a in flat.outputs]


def reduced(eqn: Any, dim: int) -> Mapping[str, Any] | None:
    """What differs in a reduction of each piece if ``dim`` is among what is reduced; None for other equations."""
    axes = eqn.params.get("axes", ())
    return {"axes": _shifted(axes, dim)} if eqn.primitive.name in REDUCTIONS and dim in axes else None


def _without(values: Sequence[Dimension], place: int) -> tuple[Dimension, ...]:
    return (*values[:place], *values[place + 1 :])


def _shifted(dims: Sequence[int], dim: int) -> tuple[int, ...]:
    """Dimensions of an array as they are numbered without ``dim``."""
    return tuple(d - (d > dim) for d in dims if d != dim)


def _before(dims: Sequence[int], dim: int) -> int:
    """The place of a dimension once ``dims`` are gone."""
    return dim - sum(d < dim for d in dims)
