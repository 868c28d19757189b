"""Order inside a program: what a value is read as, once others are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from piper_jax.lowering.context import Context
from piper_jax.lowering.keys import Key


def after_fence(context: Context, env: Mapping[Key, Any], key: Key, values: Sequence[Any]) -> Sequence[Any]:
    """What a collective reads, once the collective before it on its chain, which left ``key``, has ended."""
    return once_there(context, values, [env[key]] if key in env else [])


def once_there(context: Context, values: Sequence[Any], others: Sequence[Any]) -> Sequence[Any]:
    """``values`` as they are, once ``others`` have been computed.

    XLA takes barriers away before it schedules for a GPU. There the first element is written once more, to a place that
    only the others can tell: the order is then one of data.
    """
    if not others:
        return values
    values, others = jax.lax.optimization_barrier((list(values), list(others)))
    bits = [_bits(other) for other in others if other.size]
    if not context.has_streams or not bits:
        return values
    together = bits[0]
    for more in bits[1:]:
        together = together | more
    zero = ((together >> 16) >> 16).astype(jnp.int32)
    return [_first_written_at(zero, v) if v.size else v for v in values]


def _bits(value: Any) -> Any:
    """Of its first element."""
    return jax.lax.bitcast_convert_type(jnp.real(value.reshape(-1)[0]).astype(jnp.float32), jnp.uint32)


def _first_written_at(zero: Any, value: Any) -> Any:
    first = jax.lax.slice(value, (0,) * value.ndim, (1,) * value.ndim)
    return jax.lax.dynamic_update_slice(value, first, (zero,) * value.ndim)
