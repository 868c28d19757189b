"""Values onto the devices of a sharding, of which this process may drive some or all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding


def placed(values: Sequence[Any], targets: Sequence[Sharding], *, may_alias: bool | None = None) -> list[jax.Array]:
    """Each whole value, laid out as its sharding says; of devices of other processes, these have to place it too.

    Args:
      values: NumPy arrays, or arrays on devices of this process; the same ones in every process.
      may_alias: whether the result may share memory with the value, as in ``jax.device_put``.
    """
    if all(t.is_fully_addressable for t in targets):
        return jax.device_put(list(values), list(targets), may_alias=may_alias)
    return [_placed(v, t) for v, t in zip(values, targets, strict=True)]


def _placed(value: Any, target: Sharding) -> jax.Array:
    if is_random_key(value):
        implementation = jax.random.key_impl(value)
        words = _placed(jax.random.key_data(value), target)
        return jax.jit(lambda w: jax.random.wrap_key_data(w, impl=implementation))(words)
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, target, lambda index: whole[index])


def is_random_key(value: Any) -> bool:
    """Whether an array (or its spec) is of random keys."""
    return jax.dtypes.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key)
