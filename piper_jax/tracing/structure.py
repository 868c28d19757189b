"""The structure of a traced program as text: what a saved plan remembers of it, and how two programs are told apart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from piper_jax.ir.dag import Coupling
from piper_jax.ir.nodes import Bucket
from piper_jax.planning.structure import Structure
from piper_jax.tracing.flat import Flat
from piper_jax.tracing.model_state import ModelState
from piper_jax.tracing.optimizer_program import OptimizerProgram


def structure(
    flat: Flat,
    state: ModelState,
    optimizer: OptimizerProgram | None,
    units: Sequence[int | None],
    names: Sequence[str],
    batch: Any,
    buckets: Mapping[str, Bucket],
    couplings: Sequence[Coupling],
) -> Structure:
    """All that a plan rests on: names, shapes and wiring, no values and no lines of source.

    Args:
      units, names: the unit of each equation, None where it roams, and the names of units.
      batch: the layout of its leaves.
      buckets, couplings: what the plan knows of the update. Two optimizers that agree here may follow one plan.
    """
    return {
        "batch": tuple(f"{path}: {s.dtype}{s.shape}" for path, s in zip(batch.paths, batch.specs, strict=True)),
        "parameter": tuple(f"{leaf.path}: {leaf.dtype}{leaf.shape} {leaf.kind}" for leaf in state.leaves),
        "operation": tuple(
            ("" if unit is None else f"{names[unit]}: ")
            + f"{eqn.name}({', '.join(str(a) if isinstance(a, int) else 'literal' for a in eqn.inputs)})"
            + f" -> {', '.join(str(flat.avals[o]) for o in eqn.outputs)}"
            for eqn, unit in zip(flat.eqns, units, strict=True)
        ),
        "optimizer state": _optimizer_state(optimizer),
        "update": (
            *(f"{b.name}: {'element by element' if b.elementwise else 'whole'}" for b in buckets.values()),
            *(f"round {c.round}: exchanges {c.nbytes} bytes" for c in couplings),
        ),
    }


def _optimizer_state(optimizer: OptimizerProgram | None) -> tuple[str, ...]:
    if optimizer is None:
        return ()
    leaves = zip(optimizer.leaf_paths, optimizer.leaf_specs, optimizer.leaf_owner, strict=True)
    return tuple(
        f"{path}: {spec.dtype}{spec.shape}" + (" of no one bucket" if owner is None else f" of bucket {owner}")
        for path, spec, owner in leaves
    )


def fingerprint(known: Structure) -> str:
    """A short hash of a structure."""
    lines = [f"{kind} {text}" for kind, texts in known.items() for text in texts]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
