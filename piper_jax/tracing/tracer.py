"""``piper.trace``: a loss function and an optimizer become ONE global training DAG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from piper_jax.arguments import checked
from piper_jax.errors import TraceError
from piper_jax.planning import Plan
from piper_jax.tracing.assembly import Assembly
from piper_jax.tracing.batch_layout import BatchLayout, batch_layout
from piper_jax.tracing.chunk import Chunk, chunks
from piper_jax.tracing.expert_units import Units, divided_at_experts
from piper_jax.tracing.flat import Atom
from piper_jax.tracing.loss_function import place_of, require_loss
from piper_jax.tracing.loss_program import LossProgram, Metric, MetricKind, trace_layers, trace_loss
from piper_jax.tracing.model_state import ModelState, model_state
from piper_jax.tracing.regions import assign_units
from piper_jax.tracing.source import matched


@checked(TraceError)
def trace(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    optimizer: Any = None,
    wrt: Any = None,
    forward_only: bool = False,
) -> Plan:
    """Traces one training step into a Plan; touches no device and computes nothing.

    Args:
      loss_fn: ``loss_fn(params_or_model, batch[, rng]) -> loss | (loss, aux) | WeightedLoss``, pure. ``rng`` is the key
        of the slice.
      params: a pytree of arrays or ``jax.ShapeDtypeStruct``, or an ``nnx.Module``. Numbers of Python and
        NumPy are arrays too: floats are trained, and all come back as arrays. Other leaves (True, "tanh") are static.
      batch: a pytree of arrays ``[batch, ...]`` or their shapes; scalars are shared by all slices.
      optimizer: an ``optax.GradientTransformation``; without one gradients are reduced, and the updates change nothing.
      wrt: what is trained: for modules a Variable filter (``nnx.Param``); for pytrees a path such as ``"*.lora_a"``,
        several, or a tree of booleans like a mask of optax (every array of floating-point numbers).
      forward_only: ``loss_fn`` may return anything; the plan has forward passes alone.

    Returns:
      A Plan with one operation per region (or automatic cut point), not yet placed.

    Raises:
      TraceError: what cannot be planned, with the module path and the line.
    """
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TraceError(
            f"trace: optimizer is a {type(optimizer).__name__}, without init and update.",
            help="pass an optax.GradientTransformation such as optax.adamw(1e-3).",
        )
    require_loss(loss_fn)
    layout = batch_layout(batch)
    state, program = trace_layers(loss_fn, model_state(params, wrt), layout, forward_only=forward_only)
    return _plan(loss_fn, state, layout, program, optimizer, forward_only)


def trace_alike(plan: Plan, loss_fn: Callable[..., Any], batch: Any, *, forward_only: bool = False) -> Plan:
    """Traces another function of the parameters of a plan, in which they are the same leaves, whatever loops it has."""
    require_loss(loss_fn)
    state, layout = plan.source.state, batch_layout(batch)
    program = trace_loss(loss_fn, state, layout, layout.size, forward_only=forward_only)
    return _plan(loss_fn, state, layout, program, None, forward_only)


def _plan(
    loss_fn: Callable[..., Any],
    state: ModelState,
    layout: BatchLayout,
    program: LossProgram,
    optimizer: Any,
    forward_only: bool,
) -> Plan:
    doubled = trace_loss(loss_fn, state, layout, 2 * layout.size, forward_only=forward_only)
    batch_dims = _batch_dims(program, matched(program, doubled, 2 * layout.size))
    program = replace(program, metrics=_reductions(program, doubled, batch_dims))
    state = state.carrying({change.leaf: change.carry for change in program.carried})
    units = divided_at_experts(program, assign_units(program))
    if not units.places:
        raise TraceError(
            f"trace: nothing in the loss of {place_of(loss_fn)} depends on both the parameters and the batch.",
            help="the loss function must use its first two arguments.",
        )
    parts = chunks(program, units.of_eqn, [[u] for u in range(len(units.places))])
    _refuse_carrying_experts(program, state, units, parts)
    return Assembly(loss_fn, state, layout, program, units, parts, batch_dims, optimizer, forward_only).plan()


def _refuse_carrying_experts(program: LossProgram, state: ModelState, units: Units, parts: Sequence[Chunk]) -> None:
    changing = {change.leaf for change in program.carried}
    for place, part in zip(units.places, parts, strict=True):
        inside = {*part.state, *(program.carried[i].leaf for i in part.carried)} & changing
        if place.EP is not None and inside:
            raise TraceError(
                f"trace: {state.leaves[min(inside)].path} changes, and an expert region reads or changes it.",
                help="change state outside of piper.expert_region, and pass it what it reads as an argument.",
            )


def _batch_dims(program: LossProgram, doubled: LossProgram) -> tuple[int | None, ...]:
    """For each value, the dimension that grows with the batch."""
    pairs = zip(program.flat.avals, doubled.flat.avals, strict=True)
    return tuple(
        next((d for d, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b), None)
        for one, two in pairs
    )


def _reductions(program: LossProgram, doubled: LossProgram, batch_dims: Sequence[int | None]) -> tuple[Metric, ...]:
    """How metrics are combined where the user did not say: rows in order, what all slices have alike as it is."""
    differs = program.differs_by_slice()
    return tuple(
        metric if metric.explicit else replace(metric, kind=_kind(differs, metric, other.atom, batch_dims))
        for metric, other in zip(program.metrics, doubled.metrics, strict=True)
    )


def _kind(differs: Sequence[bool], metric: Metric, doubled: Atom, batch_dims: Sequence[int | None]) -> MetricKind:
    if not isinstance(metric.atom, int):
        return metric.kind if metric.atom.val != doubled.val else "last"  # type: ignore[union-attr]
    if (dim := batch_dims[metric.atom]) is not None and dim > 0:
        raise TraceError(
            f"trace: the auxiliary output {metric.path or 'aux'} has the batch on dimension {dim}.",
            help="put the batch on dimension 0, or reduce it inside the loss function.",
        )
    if not differs[metric.atom]:
        return "last"
    return "samples" if dim == 0 else metric.kind
