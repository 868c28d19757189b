"""What an update did, kept in the optimizer state: there it is exact under any strategy, and in checkpoints."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

OBSERVED = ("grad_norm", "learning_rate")


class Observed(NamedTuple):
    """State of :func:`observed`.

    Attributes:
      grad_norm: of the last step's whole gradient, before clipping; float32.
      learning_rate: of the last step; float32.
      num_steps: with finite gradients.
      inner: state of the optimizer.
    """

    grad_norm: jax.Array
    learning_rate: jax.Array
    num_steps: jax.Array
    inner: Any


def observed(
    inner: optax.GradientTransformation, schedule: optax.Schedule, *, clip_norm: float | None
) -> optax.GradientTransformation:
    """``inner`` after clipping by the global norm, which is computed once, for clipping and to be looked at.

    A gradient that is not finite changes nothing, on any stage: neither parameters nor the state of ``inner``; the norm
    in the new state says so.

    Args:
      schedule: steps with finite gradients before -> learning rate, as ``inner`` has it.
      clip_norm: bound of the norm; None: no clipping.
    """

    def init(params: Any) -> Observed:
        zero = jnp.zeros((), jnp.float32)
        return Observed(zero, zero, jnp.zeros((), jnp.int32), inner.init(params))

    def update(gradients: Any, state: Observed, params: Any = None) -> tuple[Any, Observed]:
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm)
        clipped = gradients if clip_norm is None else _clipped(gradients, norm, clip_norm)
        updates, after = inner.update(clipped, state.inner, params)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)  # noqa: E731
        return keep(updates, optax.tree.zeros_like(updates)), Observed(
            grad_norm=norm.astype(jnp.float32),
            learning_rate=jnp.asarray(schedule(state.num_steps), jnp.float32),
            num_steps=state.num_steps + finite.astype(jnp.int32),
            inner=keep(after, state.inner),
        )

    return optax.GradientTransformation(init, update)


def _clipped(gradients: Any, norm: jax.Array, bound: float) -> Any:
    """As ``optax.clip_by_global_norm``, bit for bit."""
    return jax.tree.map(lambda g: jax.lax.select(norm < bound, g, (g / norm.astype(g.dtype)) * bound), gradients)
