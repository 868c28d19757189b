"""Flat shards: a leaf of any shape as equal parts of its padded elements, one for each device that holds a copy.

Also the collectives on them, one for all leaves that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from piper_jax import _jax_compat
from piper_jax.tracing.elementwise import REDUCTIONS, Combine
from piper_jax.tracing.flat import Atom, FlatEqn, read

Axes = tuple[str, ...]


def shard_length(shape: Sequence[int], count: int) -> int:
    """Elements of each of ``count`` shards of an array, padding included."""
    return -(-math.prod(shape) // count)


def to_rows(value: Any, count: int, parts: int = 1) -> Any:
    """An array as ``[count, shard_length]``, padded with zeros.

    Args:
      parts: equal parts of dimension 0 that are divided each by itself: ``[count * parts, shard_length]``, the first
        shard of each part first.
    """
    size = math.prod(value.shape) // parts
    length = shard_length((size,), count)
    pad = np.pad if isinstance(value, np.ndarray) else jnp.pad
    rows = pad(value.reshape(parts, size), ((0, 0), (0, length * count - size)))
    return rows.reshape(parts, count, length).swapaxes(0, 1).reshape(count * parts, length)


def from_rows(rows: Any, shape: Sequence[int], parts: int = 1) -> Any:
    """The inverse of ``to_rows``."""
    length, size = rows.shape[-1], math.prod(shape) // parts
    count = math.prod(rows.shape[:-1]) // parts
    of_parts = rows.reshape(count, parts, length).swapaxes(0, 1).reshape(parts, count * length)
    return of_parts[:, :size].reshape(tuple(shape))


def scatter_sum(values: Sequence[Any], axes: Axes, count: int) -> list[Any]:
    """Sums whole arrays over mesh axes and leaves each device its shards: ONE reduce_scatter for each dtype."""
    out: list[Any] = [None] * len(values)
    for dtype in dict.fromkeys(v.dtype for v in values):
        chosen = [k for k, v in enumerate(values) if v.dtype == dtype]
        rows = [to_rows(values[k], count) for k in chosen]
        shard = jax.lax.psum_scatter(jnp.concatenate(rows, axis=1), axes, scatter_dimension=0, tiled=False)
        _fill(out, chosen, jnp.split(shard, _ends(rows), axis=0))
    return out


def gather_whole(shards: Sequence[Any], shapes: Sequence[Sequence[int]], axes: Axes) -> list[Any]:
    """Whole arrays of given shapes from the shards of all devices along mesh axes: ONE all_gather."""
    if len({s.dtype for s in shards}) > 1:
        words = gather_whole([_bytes(s) for s in shards], [(-1,)] * len(shards), axes)
        rows = [_from_bytes(w, s) for w, s in zip(words, shards, strict=True)]
    else:
        gathered = jax.lax.all_gather(jnp.concatenate(shards), axes)
        rows = jnp.split(gathered, _ends(shards), axis=1)
    return [r.reshape(-1) if shape == (-1,) else from_rows(r, shape) for r, shape in zip(rows, shapes, strict=True)]


def _ends(arrays: Sequence[Any]) -> list[int]:
    ends, total = [], 0
    for array in arrays[:-1]:
        total += array.shape[-1]
        ends.append(total)
    return ends


def _fill(out: list[Any], positions: Sequence[int], values: Sequence[Any]) -> None:
    for k, value in zip(positions, values, strict=True):
        out[k] = value


def _bytes(value: Any) -> Any:
    value = value.astype(jnp.uint8) if value.dtype == jnp.bool_ else value
    value = jnp.stack([jnp.real(value), jnp.imag(value)], -1) if jnp.iscomplexobj(value) else value
    return jax.lax.bitcast_convert_type(value, jnp.uint8).reshape(-1)


def _from_bytes(words: Any, like: Any) -> Any:
    if jnp.iscomplexobj(like):
        part = jnp.finfo(like.dtype).dtype
        pairs = jax.lax.bitcast_convert_type(words.reshape(-1, 2, part.itemsize), part)
        return jax.lax.complex(pairs[:, 0], pairs[:, 1])
    if like.dtype == jnp.bool_ or like.dtype.itemsize == 1:
        return words.astype(like.dtype) if like.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(words, like.dtype)
    return jax.lax.bitcast_convert_type(words.reshape(-1, like.dtype.itemsize), like.dtype)


@dataclass(frozen=True, slots=True)
class Shard:
    """What this device holds: shard ``index`` (traced) of ``count``, of part ``part`` (traced) of ``parts``."""

    count: int
    index: Any
    parts: int = 1
    part: Any = 0

    def of(self, value: Any) -> Any:
        """This device's shard of a whole array."""
        rows = to_rows(jnp.asarray(value), self.count, self.parts)
        return jax.lax.dynamic_index_in_dim(rows, self.index * self.parts + self.part, 0, keepdims=False)

    def of_part(self, value: Any) -> Any:
        """This device's shard of its own part of an array."""
        return jax.lax.dynamic_index_in_dim(to_rows(value, self.count), self.index, 0, keepdims=False)

    def length(self, shape: Sequence[int]) -> int:
        """Elements that this device holds of a whole array, padding included."""
        return shard_length((math.prod(shape) // self.parts,), self.count)

    def reduce(self, eqn: FlatEqn, value: Any, shape: Sequence[int], combine: Combine) -> Any:
        """A reduction over this device's elements, padding left out."""
        return _jax_compat.bind(eqn.eqn, [self.masked(value, shape, combine)], axes=(0,))[0]

    def masked(self, value: Any, shape: Sequence[int], combine: Combine) -> Any:
        """The shard with what does not change a reduction in the place of padding."""
        size = math.prod(shape) // self.parts
        if size % self.count == 0:
            return value
        position = self.index * value.shape[0] + jnp.arange(value.shape[0])
        return jnp.where(position < size, value, _neutral(combine, value.dtype))


def _neutral(combine: Combine, dtype: Any) -> Any:
    if combine in ("and", "or", "sum"):
        return jnp.asarray(combine == "and", dtype)
    lowest = combine == "max"
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(jnp.iinfo(dtype).min if lowest else jnp.iinfo(dtype).max, dtype)
    return jnp.asarray(-jnp.inf if lowest else jnp.inf, dtype)


COMBINE: Mapping[Combine, Callable[[Any], Any]] = {
    "sum": lambda parts: parts.sum(0), "max": lambda parts: parts.max(0), "min": lambda parts: parts.min(0),
    "and": lambda parts: parts.all(0), "or": lambda parts: parts.any(0),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShardEvaluation:
    """Evaluates equations of an optimizer on shards where their bucket is in shards, else on whole arrays.

    Attributes:
      shard_of: for a value that shards stand for, this device's Shard; None for others.
      combine: how each exchanged value of a sharded bucket is put together.
      values: by number, shards or whole.  received: exchanged values, whole.
    """

    avals: Sequence[Any]
    shard_of: Callable[[int], Shard | None]
    combine: Mapping[int, Combine]
    values: dict[int, Any]
    received: Mapping[int, Any]

    def run(self, eqns: Sequence[FlatEqn]) -> None:
        for eqn in eqns:
            own = self.shard_of(eqn.outputs[0])
            taken = next(((a, s) for a in eqn.reads() if (s := self.shard_of(a)) is not None), None)
            if own is not None:
                results: Sequence[Any] = self._elementwise(eqn, own)
            elif taken is not None and eqn.outputs[0] in self.combine:
                value, shard = taken
                results = [shard.reduce(eqn, self.values[value], self.avals[value].shape, REDUCTIONS[eqn.name])]
            else:
                results = _jax_compat.bind(eqn.eqn, [self.whole(a) for a in eqn.inputs])
            self.values.update(zip(eqn.outputs, results, strict=True))

    def whole(self, atom: Atom) -> Any:
        """A value as a mixing equation reads it: put together, if it was exchanged."""
        if isinstance(atom, int) and atom in self.received:
            return self.received[atom]
        return read(atom, self.values)

    def part(self, atom: Atom, shard: Shard) -> Any:
        """This device's shard of a value."""
        if isinstance(atom, int) and atom in self.values and self.shard_of(atom) is not None:
            return self.values[atom]
        return shard.of(self.whole(atom))

    def sent(self, value: int) -> Any:
        """An exchanged value as this device sends it: its part of a reduction, or of a single number."""
        shard = self.shard_of(value)
        if shard is None:
            return self.values[value]
        aval = self.avals[value]
        return shard.masked(self.values[value], aval.shape, self.combine[value]).reshape(aval.shape)

    def _elementwise(self, eqn: FlatEqn, shard: Shard) -> Sequence[Any]:
        length = shard.length(self.avals[eqn.outputs[0]].shape)
        single = self.avals[eqn.outputs[0]].shape == ()

        def operand(atom: Atom) -> Any:
            aval = self.avals[atom] if isinstance(atom, int) else atom.aval
            if aval.shape == () and not (single and isinstance(atom, int) and self.shard_of(atom) is not None):
                return jnp.broadcast_to(jnp.asarray(self.whole(atom), aval.dtype), (length,))
            return self.part(atom, shard)

        return _jax_compat.bind(eqn.eqn, [operand(a) for a in eqn.inputs])
