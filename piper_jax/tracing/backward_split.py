"""Partitions a backward program into BI (what input cotangents need) and BW (the rest): no equation twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from piper_jax.tracing.flat import Flat


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


def _reads(eqns: Iterable, outputs: Iterable) -> set[int]:
    return {a for e in eqns for a in e.reads()} | {a for a in outputs if isinstance(a, int)}
