"""Partitions a backward program into BI (what input cotangents need) and BW (the rest): no equation twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from piper_jax import _jax_compat
from piper_jax.tracing.costs import total_flops
from piper_jax.tracing.flat import Flat, FlatEqn

USELESS = 0.1
"""Where equations give cotangents and gradients at once, BW must have more than this share of their operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """The two halves of a backward program.

    Attributes:
      for_inputs: inputs of the whole -> cotangents, then the ``crossing`` values.
      for_weights: inputs of the whole, then the crossing values -> gradients.
      crossing: values that BI computes and BW reads.
    """

    for_inputs: Flat
    for_weights: Flat
    crossing: tuple[int, ...]


def split_backward(backward: Flat, num_cotangents: int, num_state: int) -> Halves:
    """Splits ``backward`` (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2).

    Where no cotangent leaves (the first stage), BI is the chain of activations' cotangents within the stage: all that
    equations reading a parameter need.

    Args:
      backward: inputs start with ``num_state`` parameters; outputs with ``num_cotangents`` cotangents.
    """
    gradients = backward.outputs[num_cotangents:]
    targets: list = list(backward.outputs[:num_cotangents])
    if not num_cotangents:
        params = set(backward.inputs[:num_state])
        targets = [o for e in backward.eqns if any(a in params for a in e.reads()) for o in e.outputs]
    first = set(backward.needed(targets))
    made = {o for i in first for o in backward.eqns[i].outputs}
    rest = [e for i, e in enumerate(backward.eqns) if i not in first]
    read = _reads(rest, gradients)
    crossing = tuple(sorted(made & read))
    return Halves(
        for_inputs=replace(
            backward,
            eqns=tuple(e for i, e in enumerate(backward.eqns) if i in first),
            outputs=(*backward.outputs[:num_cotangents], *crossing),
        ),
        for_weights=replace(backward, eqns=tuple(rest), inputs=(*backward.inputs, *crossing), outputs=gradients),
        crossing=crossing,
    )


def whole_because(halves: Halves) -> str:
    """Why a backward is better left whole; nothing where splitting it leaves BW something to do.

    One equation is never divided: a loop (``scan``), a branch (``cond``) or a kernel that gives cotangents and
    gradients at once is all in BI, which then has finished gradients to keep until BW adds them up. What ``jax.jit``,
    ``jax.checkpoint`` and the backward function of a ``custom_vjp`` hold is in the open, and divides.
    """
    bi, bw = halves.for_inputs, halves.for_weights
    if not bw.outputs:
        return "it has no trainable parameters"
    work = total_flops(bw.eqns)
    both = _giving_both(halves)
    if both and work <= USELESS * total_flops(both):
        name, line = both[0].name, _jax_compat.user_line(both[0].eqn)
        return f"one `{name}`{f' at {line}' if line else ''} gives cotangents and gradients"
    return "" if work or not bi.eqns else "its gradients take no operations of their own"


def _giving_both(halves: Halves) -> list[FlatEqn]:
    """Equations of BI of whose results BI uses some, or none, and others are for BW alone; the dearest first."""
    bi = halves.for_inputs
    inside = _reads(bi.eqns, bi.outputs[: len(bi.outputs) - len(halves.crossing)])
    later = _reads(halves.for_weights.eqns, halves.for_weights.outputs) - inside
    found = [e for e in bi.eqns if len(e.outputs) > 1 and later.intersection(e.outputs)]
    return sorted(found, key=lambda e: -total_flops([e]))


def _reads(eqns: Iterable, outputs: Iterable) -> set[int]:
    return {a for e in eqns for a in e.reads()} | {a for a in outputs if isinstance(a, int)}
