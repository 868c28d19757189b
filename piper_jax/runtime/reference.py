"""The oracle: what a step means, on one device, one microbatch after another, with no plan at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from piper_jax.runtime.replicas import REPLICA_AXIS, over_replicas
from piper_jax.tracing.annotations import loss_parts, replica_axes
from piper_jax.tracing.loss_program import batch_layout, call_loss
from piper_jax.tracing.model_state import ModelState, model_state

TOLERANCES: Mapping[str, float] = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2e-2}
"""How far a planned step may be from the reference, by the narrowest dtype that the loss computes in: the largest
difference of a leaf as a fraction of its largest value. Narrow dtypes are accumulated in float32."""


def reference_gradients(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    num_microbatches: int = 1,
    num_replicas: int = 1,
    key: Any = None,
    step: int = 0,
    wrt: Any = None,
) -> tuple[Any, Any]:
    """Loss and gradients of one step by the definition: the mean (or weighted mean) over slices.

    Microbatches run one after another; the replicas of each run under ``jax.vmap`` with a named axis, so that
    ``mean_over_replicas`` means the same. Slice ``s`` gets ``fold_in(fold_in(key, step), s)``.

    Returns:
      ``(loss, gradients)``: a scalar, and a pytree like the trainable part of ``params``.
    """
    state, layout = model_state(params, wrt), batch_layout(batch)
    values = [jnp.asarray(v) if not _is_key(v) else v for v in state.values(params)]
    step_key = jax.random.fold_in(jax.random.key(0) if key is None else key, step)
    rows = layout.size // (num_microbatches * num_replicas)
    slices = (num_microbatches, num_replicas)
    sliced = [
        v.reshape(*slices, rows, *v.shape[1:]) if v.ndim else jnp.broadcast_to(v, slices)
        for v in map(jnp.asarray, layout.values(batch))
    ]

    def parts(trained: list[Any], m: Any) -> dict[str, Any]:
        def one(trained: list[Any], rows_of: list[Any], replica: Any) -> dict[str, Any]:
            full = _with_trained(state, values, trained)
            slice_key = jax.random.fold_in(step_key, m * num_replicas + replica)
            with replica_axes((REPLICA_AXIS,)):
                return loss_parts(call_loss(loss_fn, state, full, layout.build(rows_of), slice_key)[0])[0]

        return over_replicas(one, trained, [v[m] for v in sliced], jnp.arange(num_replicas))

    trained = [values[i] for i in state.trainable]
    loss, grads = _accumulate(parts, trained, num_microbatches, num_microbatches * num_replicas)
    return loss, state.trainable_tree(grads)


def _accumulate(
    parts: Callable[..., Any], trained: list[Any], num_microbatches: int, num_slices: int
) -> tuple[Any, Any]:
    weight: Any = 1.0
    microbatches = jnp.arange(num_microbatches)
    if "weight" in jax.eval_shape(lambda t: parts(t, 0), trained):
        weight = jax.lax.map(lambda m: parts(trained, m)["weight"].sum(), microbatches).sum()

    def objective(t: list[Any], m: Any) -> Any:
        found = parts(t, m)
        if "weight" in found:
            return found["total"].sum() / weight + found["extra"].sum() / num_slices
        return found["loss"].sum() / num_slices

    def add(total: tuple[Any, list[Any]], m: Any) -> tuple[tuple[Any, list[Any]], None]:
        value, grads = jax.value_and_grad(objective)(trained, m)
        return (total[0] + value, [a + g for a, g in zip(total[1], grads, strict=True)]), None

    zeros = [jnp.zeros(t.shape, jnp.promote_types(t.dtype, jnp.float32)) for t in trained]
    zero = jnp.zeros((), jnp.promote_types(jax.eval_shape(objective, trained, 0).dtype, jnp.float32))
    (loss, total), _ = jax.lax.scan(add, (zero, zeros), microbatches)
    return loss, [a.astype(t.dtype) for a, t in zip(total, trained, strict=True)]


def reference_step(
    loss_fn: Callable[..., Any],
    params: Any,
    opt_state: Any,
    batch: Any,
    *,
    optimizer: Any,
    wrt: Any = None,
    **slices: Any,
) -> tuple[Any, Any, Any]:
    """One whole step by the definition, with the plain optax update.

    Args:
      opt_state: None for the first step, else what the last call returned.
      **slices: as for ``reference_gradients``.

    Returns:
      ``(loss, trainable pytree after the update, optimizer state)``; feed the pytree back with ``with_trainable``.
    """
    state = model_state(params, wrt)
    trained = state.trainable_tree([jnp.asarray(state.values(params)[i]) for i in state.trainable])
    opt_state = optimizer.init(trained) if opt_state is None else opt_state
    loss, grads = reference_gradients(loss_fn, params, batch, wrt=wrt, **slices)
    updates, opt_state = optimizer.update(grads, opt_state, trained)
    return loss, optax.apply_updates(trained, updates), opt_state


def with_trainable(params: Any, trained: Any, wrt: Any = None) -> Any:
    """``params`` (a pytree or module) with its trainable leaves taken from ``trained``."""
    state = model_state(params, wrt)
    return state.build(_with_trained(state, state.values(params), jax.tree.leaves(trained)))


def _with_trained(state: ModelState, values: list[Any], trained: list[Any]) -> list[Any]:
    full = list(values)
    for i, value in zip(state.trainable, trained, strict=True):
        full[i] = value
    return full


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
