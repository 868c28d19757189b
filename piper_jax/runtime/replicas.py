"""The replicas of one microbatch on one device: ``jax.vmap`` with a named axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

REPLICA_AXIS = "piper_replica"


def over_replicas(one: Callable[..., Any], shared: Any, *rows: Any) -> Any:
    """Evaluates ``one(shared, *row)`` for every replica; collectives over ``REPLICA_AXIS`` are of all of them.

    Some operations, such as ``jax.lax.ragged_dot``, can be mapped over all of their operands only. If there is one,
    each replica gets a copy of what they share.

    Args:
      shared: a pytree of arrays, such as parameters.
      rows: pytrees of arrays with the replicas on dimension 0.
    """
    try:
        return jax.vmap(one, in_axes=(None, *(0 for _ in rows)), axis_name=REPLICA_AXIS)(shared, *rows)
    except NotImplementedError:
        num_replicas = jax.tree.leaves(rows)[0].shape[0]
        copies = jax.tree.map(lambda v: jnp.broadcast_to(v, (num_replicas, *v.shape)), shared)
        return jax.vmap(one, axis_name=REPLICA_AXIS)(copies, *rows)
