"""The oracle: what a step means, on one device, one microbatch after another, with no plan at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from piper_jax.runtime.replicas import REPLICA_AXIS, over_replicas
from piper_jax.tracing.annotations import loss_parts, replica_axes
from piper_jax.tracing.batch_layout import BatchLayout, batch_layout
from piper_jax.tracing.carried_state import left
from piper_jax.tracing.constraints import under_a_mesh
from piper_jax.tracing.loss_function import call_loss
from piper_jax.tracing.loss_program import key_spec
from piper_jax.tracing.model_state import ModelState, model_state

TOLERANCES: Mapping[str, float] = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2e-2}
"""How far a planned step may be from the reference, by the narrowest dtype that the loss computes in: the largest
difference of a leaf as a fraction of its largest value. Narrow dtypes are accumulated in float32."""


def reference_gradients(loss_fn: Callable[..., Any], params: Any, batch: Any, **slices: Any) -> tuple[Any, Any]:
    """Loss and gradients of one step by the definition: the mean (or weighted mean) over slices.

    Microbatches run one after another; the replicas of each run under ``jax.vmap`` with a named axis, so that
    ``mean_over_replicas`` means the same. Slice ``s`` gets ``fold_in(fold_in(key, step), s)``. Each replica carries
    ``sequential`` state over its microbatches, and the replicas are averaged at the end.

    Args:
      **slices: ``num_microbatches=1``, ``num_replicas=1``, ``key``, ``step=0``, and ``wrt`` as for ``trace``.

    Returns:
      ``(loss, gradients)``: a scalar, and a pytree like the trainable part of ``params``.
    """
    loss, gradients, _, state = _pass(loss_fn, params, batch, **slices)
    return loss, state.trainable_tree(gradients)


def reference_step(
    loss_fn: Callable[..., Any], params: Any, opt_state: Any, batch: Any, *, optimizer: Any, **slices: Any
) -> tuple[Any, Any, Any, Any]:
    """One whole step by the definition, with the plain optax update.

    Args:
      opt_state: None for the first step, else what the last call returned.
      **slices: as for ``reference_gradients``.

    Returns:
      ``(loss, gradients, params after the step, optimizer state)``.
    """
    loss, gradients, values, state = _pass(loss_fn, params, batch, **slices)
    trained = state.trainable_tree([values[i] for i in state.trainable])
    opt_state = optimizer.init(trained) if opt_state is None else opt_state
    tree = state.trainable_tree(gradients)
    updates, opt_state = optimizer.update(tree, opt_state, trained)
    updated = jax.tree.leaves(optax.apply_updates(trained, updates))
    return loss, tree, state.build(_with_trained(state, values, updated)), opt_state


def with_trainable(params: Any, trained: Any, wrt: Any = None) -> Any:
    """``params`` (a pytree or module) with its trainable leaves taken from ``trained``."""
    state = model_state(params, wrt)
    return state.build(_with_trained(state, state.values(params), jax.tree.leaves(trained)))


def _pass(
    loss_fn: Callable[..., Any], params: Any, batch: Any, *, wrt: Any = None, **slices: Any
) -> tuple[Any, list[Any], list[Any], ModelState]:
    """Loss, gradients of the trainable leaves, all leaves with the state that the next step sees, and their layout."""
    state = model_state(params, wrt)
    return under_a_mesh(lambda: _pass_of(loss_fn, params, batch, state, **slices), state.axis_names)


def _pass_of(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    state: ModelState,
    *,
    num_microbatches: int = 1,
    num_replicas: int = 1,
    key: Any = None,
    step: int = 0,
) -> tuple[Any, list[Any], list[Any], ModelState]:
    layout = batch_layout(batch)
    values = [jnp.asarray(v) if not _is_key(v) else v for v in state.values(params)]
    step_key = jax.random.fold_in(jax.random.key(0) if key is None else key, step)
    rows = layout.size // (num_microbatches * num_replicas)
    slices = (num_microbatches, num_replicas)
    policies = _policies(loss_fn, state, values, layout, rows)
    state = state.carrying(dict.fromkeys(policies, "sequential"))
    sliced = [
        v.reshape(*slices, rows, *v.shape[1:]) if v.ndim else jnp.broadcast_to(v, slices)
        for v in map(jnp.asarray, layout.values(batch, "step"))
    ]

    def parts(trained: list[Any], turn: dict[int, Any], m: Any) -> tuple[dict[str, Any], dict[int, Any]]:
        def one(trained: list[Any], rows_of: list[Any], replica: Any, turn: dict[int, Any]) -> tuple[Any, Any]:
            full = _with_trained(state, values, trained)
            full = [turn.get(i, v) for i, v in enumerate(full)]
            slice_key = jax.random.fold_in(step_key, m * num_replicas + replica)
            with replica_axes((REPLICA_AXIS,)):
                result, built = call_loss(loss_fn, state, full, layout.build(rows_of), slice_key)
            found, aux = loss_parts(result)
            return found, {i: v for i, (v, _) in left(aux, state.mutated(built), full, state).items() if i in policies}

        return over_replicas(one, trained, [v[m] for v in sliced], jnp.arange(num_replicas), turn)

    trained = [values[i] for i in state.trainable]
    in_turn = [i for i, carry in policies.items() if carry == "sequential"]
    turn = {i: jnp.broadcast_to(values[i], (num_replicas, *values[i].shape)) for i in in_turn}
    loss, gradients, seen = _accumulate(parts, trained, turn, num_microbatches, num_microbatches * num_replicas)
    after = {i: _next(policies[i], values[i], found, num_microbatches) for i, found in seen.items()}
    return loss, gradients, [after.get(i, v) for i, v in enumerate(values)], state


def _policies(
    loss_fn: Callable[..., Any], state: ModelState, values: list[Any], layout: BatchLayout, rows: int
) -> dict[int, str]:
    """How each leaf that the loss function changes is carried."""
    found: dict[int, str] = {}

    def one(values: list[Any], rows_of: list[Any], key: Any) -> None:
        result, built = call_loss(loss_fn, state, values, layout.build(rows_of), key)
        changed = left(loss_parts(result)[1], state.mutated(built), values, state)
        found.update({leaf: carry for leaf, (_, carry) in changed.items()})

    jax.eval_shape(one, values, layout.specs_at(rows), key_spec())
    return dict(sorted(found.items()))


def _next(carry: str, before: Any, found: Any, num_microbatches: int) -> Any:
    """The state of the next step: ``found`` is ``[replicas, ...]`` of the last microbatch, or of all of them added."""
    if carry == "sequential":
        is_float = jnp.issubdtype(before.dtype, jnp.inexact)
        return found.mean(0).astype(before.dtype) if is_float else found[0]
    total = found.sum(0)
    return (total if carry == "sum" else total / (num_microbatches * len(found))).astype(before.dtype)


def _accumulate(
    parts: Callable[..., Any], trained: list[Any], turn: dict[int, Any], num_microbatches: int, num_slices: int
) -> tuple[Any, Any, dict[int, Any]]:
    """Loss, gradients and carried state by leaf; each microbatch sees what the one before it left of ``turn``."""
    weight: Any = 1.0
    microbatches = jnp.arange(num_microbatches)
    shapes, states = jax.eval_shape(lambda: parts(trained, turn, 0))
    if "weight" in shapes:
        weight = jax.lax.map(lambda m: parts(trained, turn, m)[0]["weight"].sum(), microbatches).sum()

    def objective(t: list[Any], turn: dict[int, Any], m: Any) -> Any:
        found, states = parts(t, turn, m)
        if "weight" in found:
            return found["total"].sum() / weight + found["extra"].sum() / num_slices, states
        return found["loss"].sum() / num_slices, states

    def add(total: Any, m: Any) -> tuple[Any, None]:
        loss, sums, seen = total
        (value, states), grads = jax.value_and_grad(objective, has_aux=True)(trained, {i: seen[i] for i in turn}, m)
        seen = {i: states[i] if i in turn else seen[i] + states[i].astype(seen[i].dtype) for i in seen}
        return (loss + value, [a + g for a, g in zip(sums, grads, strict=True)], seen), None

    zeros = [jnp.zeros(t.shape, _sum_dtype(t.dtype)) for t in trained]
    value, _ = jax.eval_shape(objective, trained, turn, 0)
    seen = turn | {i: jnp.zeros(s.shape, _sum_dtype(s.dtype)) for i, s in states.items() if i not in turn}
    zero = jnp.zeros((), _sum_dtype(value.dtype))
    (loss, total, seen), _ = jax.lax.scan(add, (zero, zeros, seen), microbatches)
    return loss, [a.astype(t.dtype) for a, t in zip(total, trained, strict=True)], seen


def _sum_dtype(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def _with_trained(state: ModelState, values: list[Any], trained: list[Any]) -> list[Any]:
    full = list(values)
    for i, value in zip(state.trainable, trained, strict=True):
        full[i] = value
    return full


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
