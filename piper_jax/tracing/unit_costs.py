"""What a unit costs: FLOPs of its passes, bytes of its residuals, collectives inside it; whether BI and BW divide."""

from __future__ import annotations

from typing import Any

from piper_jax.tracing.backward_split import whole_because
from piper_jax.tracing.chunk import Chunk
from piper_jax.tracing.costs import total_flops
from piper_jax.tracing.loss_program import LossProgram
from piper_jax.tracing.model_state import nbytes
from piper_jax.tracing.passes import passes


def signature(program: LossProgram, part: Chunk) -> Any:
    """Equal for units of the same equations on the same shapes (used for cost estimates only)."""
    local: dict[int, int] = {}
    eqns = []
    for i in part.eqns:
        eqn = program.flat.eqns[i]
        reads = tuple(local.setdefault(a, len(local)) for a in eqn.reads())
        outs = tuple((local.setdefault(o, len(local)), str(program.flat.avals[o])) for o in eqn.outputs)
        eqns.append((eqn.name, reads, outs))
    tail = (len(part.diff_state), len(part.diff_externals), len(part.diff_exports), len(part.terms))
    return tuple(eqns), tuple(str(program.flat.avals[v]) for v in part.externals), tail


def unit_costs(program: LossProgram, part: Chunk, remat: str | None = None) -> dict[str, Any]:
    """The cost fields of an ``Op``, for the whole batch, and whether its backward can be split."""
    built = passes(program, part, remat)
    forward = {"flops_forward": total_flops(built.evaluate.eqns)}
    means = sum(e.is_replica_mean for e in built.evaluate.eqns)
    if built.backward is None or built.halves is None:
        return {**forward, "replica_means": (means, 0)}
    residuals = built.forward.outputs[len(built.forward.outputs) - built.num_residuals :]
    used = {a for e in built.backward.eqns for a in e.reads()}
    first_external = len(built.evaluate.inputs) - len(part.externals)
    kept = [v for v in built.backward.inputs[first_external : len(built.evaluate.inputs)] if v in used]
    size = sum(nbytes(built.forward.avals[v]) for v in residuals if isinstance(v, int))
    halves = built.halves
    late = {a for e in halves.for_weights.eqns for a in e.reads()} | set(halves.for_weights.outputs)
    activations = built.backward.inputs[first_external : len(built.backward.inputs) - len(built.kinds)]
    because = whole_because(halves)
    return {
        **forward,
        "splittable": not because,
        "whole_because": because,
        "flops_backward_input": total_flops(built.halves.for_inputs.eqns),
        "flops_backward_weight": total_flops(built.halves.for_weights.eqns),
        "residual_bytes": size + sum(nbytes(built.backward.avals[v]) for v in kept),
        "kept_bytes": sum(nbytes(built.backward.avals[v]) for v in activations if v in late),
        "crossing_bytes": sum(nbytes(halves.for_inputs.avals[v]) for v in halves.crossing),
        "replica_means": (means, sum(e.is_replica_mean for e in built.backward.eqns)),
    }
