"""Opens loops over layers, and checkpoints around regions or most of a model, so that what they hold is placed apart.

A scan over stacked layers becomes ``length`` copies of its body. A stack is in pieces, one for each layer: equations
that work on each piece by itself stay with it, and only what mixes layers joins them. ::

    y = scan(body, x, stack)      -->      x1 = body(x, stack[0]); x2 = body(x1, stack[1]); ...
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core

from piper_jax import _jax_compat
from piper_jax.tracing.elementwise import REDUCTIONS
from piper_jax.tracing.flat import (
    MARK,
    REGION_TAGS,
    Atom,
    Flat,
    FlatEqn,
    RegionKey,
    Remat,
    flatten,
    inner_jaxprs,
    single_eqn,
)
from piper_jax.tracing.pieces import Division, piecewise, reduced

_COMBINE = {
    "sum": jax.lax.add, "max": jax.lax.max, "min": jax.lax.min, "and": jax.lax.bitwise_and, "or": jax.lax.bitwise_or,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pieces:
    """A value in pieces. ``of_state``: it derives from the model's state alone."""

    dim: int
    atoms: tuple[Atom, ...]
    of_state: bool

    @property
    def division(self) -> Division:
        return Division(self.dim, len(self.atoms))


Held = Atom | Pieces


def opened(flat: Flat, inputs: Sequence[Division | None], outputs: Sequence[Division | None] | None = None) -> Flat:
    """The same program with layers apart.

    Args:
      inputs: how each input is divided; its pieces are inputs in its place.
      outputs: the same for the outputs; whole ones by default.
    """
    opening = _Opening(flat)
    env: dict[int, Held] = {}
    given: list[int] = []
    for value, division in zip(flat.inputs, inputs, strict=True):
        aval = flat.avals[value]
        if division is None:
            env[value] = fresh = opening.fresh(aval)
            given.append(fresh)
            continue
        piece = aval.update(shape=division.piece_shape(aval.shape))
        own = tuple(opening.fresh(piece) for _ in range(division.count))
        env[value] = Pieces(division.dim, own, of_state=True)
        given += own
    opening.run(flat, env, (), None)
    results = [opening.held(a, env) for a in flat.outputs]
    wanted = outputs if outputs is not None else [None] * len(results)
    found = [a for held, division in zip(results, wanted, strict=True) for a in opening.as_divided(held, division)]
    return Flat(
        eqns=tuple(opening.eqns), inputs=tuple(given), outputs=tuple(found), avals=tuple(opening.avals),
        consts=opening.consts,
    )  # fmt: skip


def hidden_region(eqn: Any) -> str | None:
    """The tag of a region that an equation holds in a program of its own."""
    for inner in inner_jaxprs(eqn.params):
        for e in inner.eqns:
            tags = (found["tag"] for found in MARK.finditer(str(e.source_info.name_stack)))
            if found := next((tag for tag in tags if tag in REGION_TAGS), None) or hidden_region(e):
                return found
    return None


def _num_eqns(eqn: Any) -> int:
    return 1 + sum(_num_eqns(e) for inner in inner_jaxprs(eqn.params) for e in inner.eqns)


class _Opening:
    def __init__(self, flat: Flat):
        self.eqns: list[FlatEqn] = []
        self.avals: list[Any] = []
        self.consts: dict[int, Any] = {}
        self.num_eqns = sum(_num_eqns(eqn.eqn) for eqn in flat.eqns)
        self.known_consts: dict[tuple[int, int], int] = {}
        self.numbers = itertools.count()
        self.regions: dict[int, bool] = {}
        self.bodies: dict[int, Flat] = {}
        self.traced: dict[Any, Any] = {}
        self.joined: dict[Pieces, Atom] = {}
        self.layer_of: dict[int, tuple[Held, int]] = {}  # an operand of one iteration -> what it was taken from

    # -- values ------------------------------------------------------------------------------------------
    def fresh(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def aval(self, atom: Atom) -> Any:
        return self.avals[atom] if isinstance(atom, int) else atom.aval

    def held(self, atom: Atom, env: Mapping[int, Held]) -> Held:
        return env[atom] if isinstance(atom, int) else atom

    def whole(self, held: Held, like: FlatEqn | None = None) -> Atom:
        """The value in one array; pieces are joined once."""
        if not isinstance(held, Pieces):
            return held
        if held not in self.joined:
            dim = held.dim
            expanded = lambda v: jax.lax.expand_dims(v, (dim,))  # noqa: E731
            layers = [self.emit(expanded, (a,), like, ("expand", dim)) for a in held.atoms]
            joined = lambda *v: jax.lax.concatenate(v, dim)  # noqa: E731
            self.joined[held] = self.emit(joined, layers, like) if len(layers) > 1 else layers[0]
        return self.joined[held]

    def as_divided(self, held: Held, division: Division | None) -> tuple[Atom, ...]:
        if division is None:
            return (self.whole(held),)
        if isinstance(held, Pieces) and held.division == division:
            return held.atoms
        value = self.whole(held)
        return tuple(self.piece(value, division, k, None) for k in range(division.count))

    def piece(self, value: Atom, division: Division, k: int, like: FlatEqn | None) -> Atom:
        dim, taken = division.dim, value
        if division.count > 1:
            taken = self.emit(lambda v: jax.lax.slice_in_dim(v, k, k + 1, axis=dim), (value,), like, ("slice", dim, k))
        return self.emit(lambda v: jax.lax.squeeze(v, (dim,)), (taken,), like, ("squeeze", dim))

    # -- equations ---------------------------------------------------------------------------------------
    def append(self, like: FlatEqn | None, eqn: Any, inputs: Sequence[Atom]) -> tuple[int, ...]:
        outputs = tuple(self.fresh(v.aval) for v in eqn.outvars)
        made = (
            replace(like, eqn=eqn, inputs=tuple(inputs), outputs=outputs)
            if like
            else FlatEqn(eqn, tuple(inputs), outputs)
        )
        self.eqns.append(made)
        return outputs

    def emit(self, function: Any, inputs: Sequence[Atom], like: FlatEqn | None, key: Any = None) -> int:
        """Appends what ``function`` traces to: one equation; traced once for each ``key`` and shapes."""
        avals = tuple(self.aval(a) for a in inputs)
        known = (key, *((a.shape, a.dtype) for a in avals))
        if key is None or known not in self.traced:
            self.traced[known] = single_eqn(function, *avals)
        return self.append(like, self.traced[known], inputs)[0]

    def run(self, flat: Flat, env: dict[int, Held], calls: tuple[int, ...], outer: FlatEqn | None) -> None:
        """Visits every equation; ``outer`` is the one that they lie in, ``calls`` tells its entries apart."""
        for value, const in flat.consts.items():
            if (id(flat), value) not in self.known_consts:
                self.known_consts[id(flat), value] = fresh = self.fresh(flat.avals[value])
                self.consts[fresh] = const
            env[value] = self.known_consts[id(flat), value]
        for eqn in flat.eqns:
            here = eqn if outer is None else _inside(eqn, calls, outer)
            operands = [self.held(a, env) for a in eqn.inputs]
            env.update(zip(eqn.outputs, self.visit(here, operands), strict=True))

    def visit(self, eqn: FlatEqn, operands: Sequence[Held]) -> Sequence[Held]:
        name = eqn.name
        if name == "scan" and (parts := _jax_compat.scan_parts(eqn.eqn)) and self.is_layered(eqn, parts, operands):
            return self.scan(eqn, parts, operands)
        if name in _jax_compat.REMAT and (
            self.holds_layers(eqn, operands) or self.has_regions(eqn) or self.holds_most(eqn)
        ):
            return self.checkpoint(eqn, operands)
        if any(isinstance(held, Pieces) for held in operands):
            return self.on_pieces(eqn, operands)
        return self.append(eqn, eqn.eqn, operands)  # type: ignore[arg-type]

    # -- pieces ------------------------------------------------------------------------------------------
    def on_pieces(self, eqn: FlatEqn, operands: Sequence[Held]) -> Sequence[Held]:
        divided = [held for held in operands if isinstance(held, Pieces)]
        counts = {len(held.atoms) for held in divided}
        found = piecewise(eqn.eqn, [h.dim if isinstance(h, Pieces) else None for h in operands])
        if found is not None and len(counts) == 1:
            (count,) = counts
            given = [self.divided(h, dim, count, eqn) for h, dim in zip(operands, found.dims, strict=True)]
            atoms = tuple(self.changed(eqn, [g[k] for g in given], found.changed) for k in range(count))
            return (Pieces(found.out, atoms, all(h.of_state for h in divided)),)
        if len(operands) == 1 and (own := reduced(eqn.eqn, divided[0].dim)) is not None:
            parts, combine = [self.changed(eqn, [a], own) for a in divided[0].atoms], _COMBINE[REDUCTIONS[eqn.name]]
            for k in range(1, len(parts)):
                parts[k] = self.emit(combine, (parts[k - 1], parts[k]), eqn, combine)
            return (parts[-1],)
        return self.append(eqn, eqn.eqn, [self.whole(h, eqn) for h in operands])

    def divided(self, held: Held, dim: int | None, count: int, like: FlatEqn) -> Sequence[Atom]:
        if dim is None:
            return (self.whole(held, like),) * count
        if isinstance(held, Pieces):
            return held.atoms
        return [self.piece(held, Division(dim, count), k, like) for k in range(count)]

    def changed(self, eqn: FlatEqn, inputs: Sequence[Atom], params: Mapping[str, Any]) -> int:
        """The same equation on operands of other shapes."""
        return self.emit(lambda *v: _jax_compat.bind(eqn.eqn, v, **params)[0], inputs, eqn, id(eqn.eqn))

    # -- loops and checkpoints -----------------------------------------------------------------------------
    def body(self, closed: core.ClosedJaxpr) -> Flat:
        key = id(closed.jaxpr)
        if key not in self.bodies:
            self.bodies[key] = flatten(closed)
        return self.bodies[key]

    def has_regions(self, eqn: FlatEqn) -> bool:
        if id(eqn.eqn) not in self.regions:
            self.regions[id(eqn.eqn)] = hidden_region(eqn.eqn) is not None
        return self.regions[id(eqn.eqn)]

    def is_layered(self, eqn: FlatEqn, parts: _jax_compat.Scan, operands: Sequence[Held]) -> bool:
        stacks = operands[parts.num_consts + parts.num_carry :]
        over_layers = any(isinstance(h, Pieces) and h.of_state and h.dim == 0 for h in stacks)
        return over_layers or self.has_regions(eqn)

    def holds_layers(self, eqn: FlatEqn, operands: Sequence[Held]) -> bool:
        of_state = any(isinstance(h, Pieces) and h.of_state for h in operands)
        return of_state and any(e.primitive.name == "scan" for i in inner_jaxprs(eqn.eqn.params) for e in i.eqns)

    def holds_most(self, eqn: FlatEqn) -> bool:
        """Whether a checkpoint is around most of the model, in equations, which are as many at any batch size."""
        return 2 * _num_eqns(eqn.eqn) > self.num_eqns

    def scan(self, eqn: FlatEqn, parts: _jax_compat.Scan, operands: Sequence[Held]) -> Sequence[Held]:
        body, number = self.body(parts.body), next(self.numbers)
        first = parts.num_consts + parts.num_carry
        consts, carry, stacks = operands[: parts.num_consts], operands[parts.num_consts : first], operands[first:]
        collected: list[Sequence[Held]] = [()] * parts.length
        for k in reversed(range(parts.length)) if parts.reverse else range(parts.length):
            given = (*consts, *carry, *(self.layer(stack, k, parts.length, eqn) for stack in stacks))
            env = dict(zip(body.inputs, given, strict=True))
            self.run(body, env, (-1, number, k), eqn)
            results = [self.held(a, env) for a in body.outputs]
            carry, collected[k] = results[: parts.num_carry], results[parts.num_carry :]
        return [*carry, *(self.stacked(layers, eqn) for layers in zip(*collected, strict=True))]

    def layer(self, stack: Held, k: int, length: int, like: FlatEqn) -> Atom:
        """What iteration ``k`` gets of a stack."""
        if isinstance(stack, Pieces) and stack.dim == 0:
            own = stack.atoms[k]
        else:
            own = self.piece(self.whole(stack, like), Division(0, length), k, like)
        if isinstance(own, int):
            self.layer_of[own] = stack, k
        return own

    def stacked(self, layers: Sequence[Held], like: FlatEqn) -> Held:
        """What every iteration gave, as a stack; the very one that they were given, if they left it unchanged."""
        atoms = [self.whole(held, like) for held in layers]
        sources = {self.layer_of[a][0] if isinstance(a, int) and a in self.layer_of else None for a in atoms}
        if len(sources) == 1 and None not in sources and [self.layer_of[a][1] for a in atoms] == [*range(len(atoms))]:  # type: ignore[index]
            return next(iter(sources))  # type: ignore[return-value]
        return Pieces(0, tuple(atoms), of_state=False)

    def checkpoint(self, eqn: FlatEqn, operands: Sequence[Held]) -> Sequence[Held]:
        """What is computed again together is marked, so that each chunk checkpoints its part of it."""
        inner = _jax_compat.inner_jaxpr(eqn.eqn, remat=True)
        assert inner is not None
        params, number = eqn.eqn.params, next(self.numbers)
        remat = eqn.remat or Remat(number, params["policy"], params["prevent_cse"])
        body = self.body(inner)
        env = dict(zip(body.inputs, operands, strict=True))
        self.run(body, env, (-1, number), replace(eqn, remat=remat))
        return [self.held(a, env) for a in body.outputs]


def _inside(eqn: FlatEqn, calls: tuple[int, ...], outer: FlatEqn) -> FlatEqn:
    """An equation of a body, where its caller is."""
    regions = tuple(RegionKey(key.tag, (*calls, *key.calls), key.mark) for key in eqn.regions)
    path = ".".join(filter(None, (outer.path, eqn.path)))
    return replace(eqn, regions=(*outer.regions, *regions), path=path, remat=outer.remat or eqn.remat)
