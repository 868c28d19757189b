"""A moving average of the parameters as optimizer state: sharded, saved and restored with the rest of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

AVERAGE = "average"


class Averaged(NamedTuple):
    """State of :func:`averaged`: the average has the structure of the parameters, at least in float32."""

    average: Any
    inner: Any


def averaged(inner: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """``inner``, and after each update ``average = decay * average + (1 - decay) * params``, at first ``params``."""

    def init(params: Any) -> Averaged:
        return Averaged(jax.tree.map(_wide, params), inner.init(params))

    def update(gradients: Any, state: Averaged, params: Any) -> tuple[Any, Averaged]:
        updates, after = inner.update(gradients, state.inner, params)
        moved = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p.astype(a.dtype), state.average, moved)
        return updates, Averaged(average, after)

    return optax.GradientTransformation(init, update)


def _wide(leaf: Any) -> jax.Array:
    return jnp.asarray(leaf, jnp.promote_types(leaf.dtype, jnp.float32))
