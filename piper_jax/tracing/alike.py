"""When two chunks compute the same: keys that are equal for equal equations on equal shapes, by whatever names."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import core

from piper_jax.tracing.chunk import Chunk
from piper_jax.tracing.flat import Atom, FlatEqn
from piper_jax.tracing.loss_program import LossProgram

_SMALL = 4096  # bytes: constants up to here are compared by content, larger ones are the same only if they are one


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """An object as a key: equal to itself alone, and kept alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def alike(program: LossProgram, chunk: Chunk) -> Hashable:
    """Equal for chunks of one program whose passes are the same functions of their inputs, in order."""
    numbers = _Numbers(program)
    inputs = [numbers.entered(v) for v in chunk.inputs(program)]
    eqns = [numbers.eqn(program.flat.eqns[i]) for i in chunk.eqns]
    return (
        tuple(inputs),
        (len(chunk.state), len(chunk.batch), chunk.uses_key, tuple(i in program.in_turn for i in chunk.state)),
        tuple(eqns),
        tuple((program.terms[i][0], numbers.atom(program.terms[i][1])) for i in chunk.terms),
        tuple(numbers.atom(program.metrics[i].atom) for i in chunk.metrics),
        tuple(numbers.atom(program.carried[i].atom) for i in chunk.carried),
        tuple(numbers.atom(v) for v in chunk.exports),
        tuple(numbers.atom(program.state_input(i)) for i in chunk.diff_state),
        tuple(numbers.atom(v) for v in (*chunk.diff_externals, *chunk.diff_exports)),
        (len(chunk.diff_externals), tuple(chunk.terms.index(i) for i in chunk.diff_terms)),
    )


class _Numbers:
    """Numbers for the values of a chunk in the order in which they appear."""

    def __init__(self, program: LossProgram):
        self.flat = program.flat
        self.known: dict[int, Hashable] = {}
        self.remats: dict[int, int] = {}

    def entered(self, value: int) -> Hashable:
        self.known[value] = len(self.known)
        return _aval(self.flat.avals[value])

    def atom(self, atom: Atom) -> Hashable:
        if not isinstance(atom, int):
            return _literal(atom)
        if atom not in self.known:  # neither an input nor made here
            self.known[atom] = ("const", _array(self.flat.consts[atom]))
        return self.known[atom]

    def eqn(self, eqn: FlatEqn) -> Hashable:
        reads = tuple(self.atom(a) for a in eqn.inputs)
        writes = tuple(self.entered(o) for o in eqn.outputs)
        remat = eqn.remat and (
            self.remats.setdefault(eqn.remat.number, len(self.remats)), Same(eqn.remat.policy), eqn.remat.prevent_cse,
        )  # fmt: skip
        return eqn.eqn.primitive, _params(eqn.eqn.params), Same(eqn.eqn.ctx), reads, writes, remat


def _aval(aval: Any) -> Hashable:
    return (
        aval.str_short() if not hasattr(aval, "shape") else (aval.shape, aval.dtype, getattr(aval, "weak_type", False))
    )


def _literal(literal: Any) -> Hashable:
    return "literal", _aval(literal.aval), _array(literal.val)


def _array(value: Any) -> Hashable:
    """A constant, by content where that is small and plain."""
    if isinstance(value, bool | int | float | complex | np.generic | np.ndarray):
        found = np.asarray(value)
        if found.nbytes <= _SMALL and not found.dtype.hasobject:
            return type(value), found.shape, found.dtype, found.tobytes()
    return Same(value)


def _params(params: Mapping[str, Any]) -> Hashable:
    return tuple((name, _param(params[name])) for name in sorted(params))


def _param(value: Any) -> Hashable:
    match value:
        case core.ClosedJaxpr():
            return _jaxpr(value.jaxpr), tuple(_array(c) for c in value.consts)
        case core.Jaxpr():
            return _jaxpr(value)
        case tuple() | list():
            return type(value), tuple(_param(v) for v in value)
        case dict():
            return tuple((k, _param(v)) for k, v in value.items())
        case float():
            return float, repr(value)
        case np.ndarray() | np.generic():
            return _array(value)
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return type(value), value


def _jaxpr(jaxpr: Any) -> Hashable:
    """A program inside a parameter, without the names of its variables."""
    known: dict[Any, int] = {}

    def numbered(variables: Iterable[Any]) -> Hashable:
        found = []
        for v in variables:
            known[v] = len(known)
            found.append(_aval(v.aval))
        return tuple(found)

    def read(atoms: Sequence[Any]) -> Hashable:
        return tuple(_literal(a) if isinstance(a, core.Literal) else known[a] for a in atoms)

    given = numbered(jaxpr.constvars), numbered(jaxpr.invars)
    eqns = [(e.primitive, _params(e.params), Same(e.ctx), read(e.invars), numbered(e.outvars)) for e in jaxpr.eqns]
    return given, tuple(eqns), read(jaxpr.outvars)
