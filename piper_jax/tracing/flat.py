"""A jaxpr with all jit calls inlined: numbered values, flat equations, region marks on each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend import core

from piper_jax import _jax_compat

Atom = int | core.Literal
MARK = re.compile(r"piper:(?P<tag>[A-Z]+)#(?P<mark>\d+)")
REGION_TAGS = ("PP", "EP")
REPLICA_MEAN = "mean_over_replicas"
BOUND, THOUSANDTHS = "BOUND", 1000  # a mark that is a number: thousandths of a bound, 0 for none


@dataclass(frozen=True, slots=True)
class RegionKey:
    """One entry of an annotated region: its tag, the chain of calls that led there, and a mark unique per entry."""

    tag: str
    calls: tuple[int, ...]
    mark: int


@dataclass(frozen=True, slots=True)
class Remat:
    """A ``jax.checkpoint`` that was opened: its equations are computed again together, as far as they stay together."""

    number: int
    policy: Any
    prevent_cse: bool


@dataclass(frozen=True, slots=True)
class FlatEqn:
    """One equation on numbered values. ``eqn`` carries primitive, params and source; its own variables are not used."""

    eqn: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    regions: tuple[RegionKey, ...] = ()
    path: str = ""
    remat: Remat | None = None

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def is_replica_mean(self) -> bool:
        return self.name == REPLICA_MEAN

    @property
    def has_effects(self) -> bool:
        """Whether it does more than give its results; to read a mesh axis does not count."""
        effects = self.eqn.effects
        return bool(effects) and any(type(effect).__name__ != "NamedAxisEffect" for effect in effects)

    def reads(self) -> Iterable[int]:
        return (a for a in self.inputs if isinstance(a, int))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """A flat program: ``inputs`` and ``consts`` are given, ``eqns`` run in order, ``outputs`` are the results."""

    eqns: tuple[FlatEqn, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Atom, ...]
    avals: tuple[Any, ...]
    consts: Mapping[int, Any] = field(default_factory=dict)

    def needed(self, outputs: Iterable[Atom], available: Iterable[int] = ()) -> list[int]:
        """Indices of the equations needed for ``outputs`` when ``available`` values are given, ascending."""
        given = set(available)
        wanted = {a for a in outputs if isinstance(a, int)} - given
        kept: list[int] = []
        for index in range(len(self.eqns) - 1, -1, -1):
            eqn = self.eqns[index]
            if not wanted.isdisjoint(eqn.outputs) or eqn.has_effects:
                kept.append(index)
                wanted.update(a for a in eqn.reads() if a not in given)
        return kept[::-1]

    def without_dead_code(self) -> Flat:
        return replace(self, eqns=tuple(self.eqns[i] for i in self.needed(self.outputs)))

    def run(self, eqns: Iterable[FlatEqn], env: dict[int, Any]) -> None:
        """Evaluates ``eqns`` in ``env``, each as the equation that it is: what is traced can be lowered later."""
        for eqn in eqns:
            results = _jax_compat.bind(eqn.eqn, [read(a, env) for a in eqn.inputs])
            env.update(zip(eqn.outputs, results, strict=True))

    def __call__(self, *args: Any) -> list[Any]:
        """Evaluates the whole program on ``args``, one for each input."""
        env = {**self.consts, **dict(zip(self.inputs, args, strict=True))}
        self.run(self.eqns, env)
        return [read(a, env) for a in self.outputs]


def read(atom: Atom, env: Mapping[int, Any]) -> Any:
    """The value of an atom: a literal's own, or the variable's in ``env``."""
    return env[atom] if isinstance(atom, int) else atom.val


def inner_jaxprs(params: Mapping[str, Any]) -> list[Any]:
    """The programs among the parameters of an equation."""
    values = [v for p in params.values() for v in (p if isinstance(p, (tuple, list)) else (p,))]
    return [inner for v in values if hasattr(inner := getattr(v, "jaxpr", v), "eqns")]


def holds(eqn: Any, *names: str) -> bool:
    """Whether an equation is one of these primitives, or has one in its programs, at any depth."""
    inner = (e for jaxpr in inner_jaxprs(eqn.params) for e in jaxpr.eqns)
    return eqn.primitive.name in names or any(holds(e, *names) for e in inner)


def flatten(closed: core.ClosedJaxpr, *, select_branches: bool = False, open_remat: bool = False) -> Flat:
    """Inlines every jit call of ``closed``.

    Args:
      closed: the traced program.
      select_branches: also turn each ``cond`` into both branches and a select, so that its outputs can be owned by
        different device groups. Right only for programs without loops that rely on the untaken branch not running.
      open_remat: also inline ``jax.checkpoint``, for backward programs: what is recomputed is then theirs to divide.
    """
    return _Flattener(select_branches, open_remat).program(closed)


class _Flattener:
    def __init__(self, select_branches: bool, open_remat: bool):
        self.select_branches, self.open_remat = select_branches, open_remat
        self.eqns: list[FlatEqn] = []
        self.avals: list[Any] = []
        self.consts: dict[int, Any] = {}

    def program(self, closed: core.ClosedJaxpr) -> Flat:
        env: dict[Any, Atom] = {}
        inputs = tuple(self.fresh(v.aval) for v in closed.jaxpr.invars)
        env.update(zip(closed.jaxpr.invars, inputs, strict=True))
        outputs = self.walk(closed, env, (), ())
        return Flat(eqns=tuple(self.eqns), inputs=inputs, outputs=outputs, avals=tuple(self.avals), consts=self.consts)

    def fresh(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def walk(
        self,
        closed: core.ClosedJaxpr,
        env: dict[Any, Atom],
        calls: tuple[int, ...],
        scopes: tuple[tuple[str, tuple[int, ...]], ...],
    ) -> tuple[Atom, ...]:
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            env[var] = self.fresh(var.aval)
            self.consts[env[var]] = value
        for index, eqn in enumerate(closed.jaxpr.eqns):
            inputs = tuple(self.atom(a, env) for a in eqn.invars)
            own = tuple((part, calls) for part in str(eqn.source_info.name_stack).split("/") if part)
            here = (*scopes, *own)
            if (inner := _jax_compat.inner_jaxpr(eqn, remat=self.open_remat)) is not None:
                outputs = self.call(inner, inputs, (*calls, index), here)
            elif self.select_branches and eqn.primitive.name == "cond":
                outputs = self.branches(eqn, inputs, (*calls, index), here)
            else:
                outputs = self.append(eqn, inputs, here)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return tuple(self.atom(a, env) for a in closed.jaxpr.outvars)

    def atom(self, atom: Any, env: dict[Any, Atom]) -> Atom:
        return atom if isinstance(atom, core.Literal) else env[atom]

    def append(
        self, eqn: Any, inputs: tuple[Atom, ...], scopes: tuple[tuple[str, tuple[int, ...]], ...]
    ) -> tuple[Atom, ...]:
        outputs = tuple(self.fresh(v.aval) for v in eqn.outvars)
        regions: dict[str, RegionKey] = {}  # a derivative names the entry that it is taken in once more
        for part, calls in scopes:
            for found in MARK.finditer(part):
                regions.setdefault(found[0], RegionKey(found["tag"], calls, int(found["mark"])))
        path = ".".join(part for part, _ in scopes if not MARK.search(part))
        self.eqns.append(FlatEqn(eqn, inputs, outputs, tuple(regions.values()), path))
        same = _jax_compat.forwarded(eqn)
        return tuple(inputs[same[k]] if k in same else o for k, o in enumerate(outputs))

    def call(self, inner: Any, inputs: tuple[Atom, ...], calls: tuple[int, ...], scopes: Any) -> tuple[Atom, ...]:
        env: dict[Any, Atom] = dict(zip(inner.jaxpr.invars, inputs, strict=True))
        return self.walk(inner, env, calls, scopes)

    def branches(self, eqn: Any, inputs: tuple[Atom, ...], calls: tuple[int, ...], scopes: Any) -> tuple[Atom, ...]:
        index, *operands = inputs
        results = [
            self.call(branch, tuple(operands), (*calls, k), scopes) for k, branch in enumerate(eqn.params["branches"])
        ]
        outputs: list[Atom] = []
        for position in range(len(eqn.outvars)):
            choices = tuple(result[position] for result in results)
            select = single_eqn(jax.lax.select_n, self.aval(index), *(self.aval(c) for c in choices))
            outputs.extend(self.append(select, (index, *choices), scopes))
        return tuple(outputs)

    def aval(self, atom: Atom) -> Any:
        return self.avals[atom] if isinstance(atom, int) else atom.aval


def single_eqn(function: Callable[..., Any], *avals: Any) -> Any:
    """Traces ``function`` to exactly one equation (its own variables are replaced by the caller)."""
    (eqn,) = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)).jaxpr.eqns
    return eqn
