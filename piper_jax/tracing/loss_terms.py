"""Splits a loss into the terms it is a sum of, so that each stage can seed the gradient of its own terms.

Before --> after, for ``loss = ce + 0.01 * (a0 + a1)``::

    t = add a0 a1; u = mul 0.01 t; loss = add ce u    -->    terms: ce, (mul 0.01 a0), (mul 0.01 a1)

Without this, auxiliary losses of early stages would travel to the last stage and their cotangents back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import numpy as jnp

from piper_jax.tracing.flat import Atom, Flat, FlatEqn

_ADD = ("add", "add_any")


@dataclass(frozen=True, slots=True)
class _Term:
    atom: Atom
    factors: tuple[tuple[FlatEqn, int], ...]  # (linear equation, position of its linear operand), root first


def split_terms(flat: Flat, root: Atom, param_free: Sequence[bool]) -> tuple[Flat, tuple[Atom, ...]]:
    """Expands ``root`` through sums and parameter-free factors.

    Args:
      flat: the program; ``root`` is a scalar in it.
      param_free: for each value, whether it depends on no parameter.

    Returns:
      The program with equations appended that scale single terms, and the terms, whose sum is ``root``.
    """
    producer = {o: e for e in flat.eqns for o in e.outputs}
    uses = Counter(a for e in flat.eqns for a in e.inputs if isinstance(a, int))
    terms: list[_Term] = []
    pending = [_Term(root, ())]
    while pending:
        term = pending.pop()
        eqn = producer.get(term.atom) if isinstance(term.atom, int) else None
        if eqn is None or (term.atom != root and uses[term.atom] > 1) or not _is_scalar(flat, term.atom):
            terms.append(term)
        elif eqn.name in _ADD:
            pending.extend(_Term(a, term.factors) for a in reversed(eqn.inputs))
        elif (position := _linear_operand(flat, eqn, param_free)) is not None:
            pending.append(_Term(eqn.inputs[position], (*term.factors, (eqn, position))))
        else:
            terms.append(term)
    if len(terms) == 1:
        return flat, (root,)
    return _scaled(flat, terms)


def _is_scalar(flat: Flat, atom: Atom) -> bool:
    return isinstance(atom, int) and flat.avals[atom].shape == ()


def _linear_operand(flat: Flat, eqn: FlatEqn, param_free: Sequence[bool]) -> int | None:
    free = [not isinstance(a, int) or param_free[a] for a in eqn.inputs]
    match eqn.name:
        case "mul" if free != [False, False]:
            return 0 if free[1] else 1
        case "div" if free[1]:
            return 0
        case "neg":
            return 0
        case "convert_element_type" if jnp.issubdtype(_dtype(flat, eqn.inputs[0]), jnp.floating):
            return 0
        case _:
            return None


def _dtype(flat: Flat, atom: Atom) -> Any:
    return (flat.avals[atom] if isinstance(atom, int) else atom.aval).dtype


def _scaled(flat: Flat, terms: Sequence[_Term]) -> tuple[Flat, tuple[Atom, ...]]:
    avals, eqns, atoms = list(flat.avals), list(flat.eqns), []
    for term in terms:
        atom = term.atom
        for eqn, position in reversed(term.factors):
            avals.append(avals[eqn.outputs[0]])
            inputs = tuple(atom if i == position else a for i, a in enumerate(eqn.inputs))
            atom = len(avals) - 1
            eqns.append(replace(eqn, inputs=inputs, outputs=(atom,), regions=()))
        atoms.append(atom)
    return replace(flat, eqns=tuple(eqns), avals=tuple(avals)), tuple(atoms)
