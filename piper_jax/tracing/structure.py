"""The structure of a traced program as text: what a saved plan remembers of it, and how two programs are told apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

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
) -> Structure:
    """Parameters, operations and optimizer state: names, shapes and wiring, no values and no lines of source.

    Args:
      units, names: the unit of each equation, None where it roams, and the names of units.
    """
    return {
        "parameter": tuple(f"{leaf.path}: {leaf.dtype}{leaf.shape} {leaf.kind}" for leaf in state.leaves),
        "operation": tuple(
            ("" if unit is None else f"{names[unit]}: ")
            + f"{eqn.name}({', '.join(str(a) if isinstance(a, int) else 'literal' for a in eqn.inputs)})"
            + f" -> {', '.join(str(flat.avals[o]) for o in eqn.outputs)}"
            for eqn, unit in zip(flat.eqns, units, strict=True)
        ),
        "optimizer state": optimizer.leaf_paths if optimizer is not None else (),
    }


def fingerprint(known: Structure) -> str:
    """A short hash of a structure."""
    lines = [f"{kind} {text}" for kind, texts in known.items() for text in texts]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
