"""What a unit costs: FLOPs of its passes, bytes of its residuals, collectives inside it; whether BI and BW divide."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from piper_jax.ir.nodes import Reads
from piper_jax.tracing.alike import alike
from piper_jax.tracing.backward_split import whole_because
from piper_jax.tracing.chunk import Chunk
from piper_jax.tracing.costs import total_flops
from piper_jax.tracing.flat import REPLICA_MEAN, Flat, inner_jaxprs
from piper_jax.tracing.loss_program import LossProgram
from piper_jax.tracing.model_state import nbytes
from piper_jax.tracing.passes import Passes, passes


def unit_costs(program: LossProgram, part: Chunk, remat: str | None = None) -> dict[str, Any]:
    """The cost fields of an ``Op``, for the whole batch, and whether its backward can be split.

    ``input_reads`` and ``weight_reads`` are positions, to be named by :func:`named`, since alike units share the rest.
    """
    kind = "costs", alike(program, part), remat
    if kind not in program.shared:
        program.shared[kind] = _counted(passes(program, part, remat))
    return program.shared[kind]


def _counted(built: Passes) -> dict[str, Any]:
    part = built.chunk
    forward = {"flops_forward": total_flops(built.evaluate.eqns)}
    means = _replica_means(e.eqn for e in built.evaluate.eqns)
    if built.backward is None or built.halves is None:
        return {**forward, "replica_means": (means, 0)}
    residuals = built.forward.outputs[len(built.forward.outputs) - built.num_residuals :]
    used, late = _used(built.backward), _used(built.halves.for_weights)
    first_external = len(built.evaluate.inputs) - len(part.externals)
    kept = [v for v in built.backward.inputs[first_external : len(built.evaluate.inputs)] if v in used]
    size = sum(nbytes(built.forward.avals[v]) for v in residuals if isinstance(v, int))
    halves = built.halves
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
        "input_reads": (*_positions(built, _used(halves.for_inputs))[:2], ()),
        "weight_reads": _positions(built, late),
        "replica_means": (means, _replica_means(e.eqn for e in built.backward.eqns)),
    }


def named(costs: Mapping[str, Any], part: Chunk, leaves: Sequence[str], values: Mapping[int, str]) -> dict[str, Any]:
    """Costs of a unit with ``input_reads`` and ``weight_reads`` by name.

    Args:
      leaves: the paths of all state leaves.  values: names by number.
    """

    def reads(positions: Sequence[Sequence[int]]) -> Reads:
        state, externals, cotangents = positions
        others = (
            *(values[part.externals[k]] for k in externals),
            *(f"d {values[part.diff_exports[k]]}" for k in cotangents),
        )
        return Reads(leaves=tuple(leaves[part.state[k]] for k in state), values=others)

    return {**costs, **{half: reads(costs[half]) for half in ("input_reads", "weight_reads") if half in costs}}


def _replica_means(eqns: Iterable[Any]) -> int:
    """How often a mean over replicas is taken, in each turn of a loop too."""
    return sum(
        (eqn.primitive.name == REPLICA_MEAN)
        + eqn.params.get("length", 1) * sum(_replica_means(inner.eqns) for inner in inner_jaxprs(eqn.params))
        for eqn in eqns
    )


def _used(flat: Flat) -> set[Any]:
    return {a for e in flat.eqns for a in e.reads()} | {a for a in flat.outputs if isinstance(a, int)}


def _positions(built: Passes, used: Collection[Any]) -> tuple[tuple[int, ...], ...]:
    """Which of the state, the external values and the incoming cotangents are among the ``used`` inputs."""
    assert built.backward is not None
    part, inputs = built.chunk, built.backward.inputs
    num_inputs = len(built.evaluate.inputs)
    starts = (
        (0, len(part.state)),
        (num_inputs - len(part.externals), len(part.externals)),
        (num_inputs + built.num_residuals, len(part.diff_exports)),
    )
    return tuple(tuple(k for k in range(count) if inputs[start + k] in used) for start, count in starts)
