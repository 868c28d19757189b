"""Packs the few scalars that an optimizer update exchanges between groups into one vector of 32-bit words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def num_words(aval: Any) -> int:
    """32-bit words of a value: two for each 64-bit element, else one."""
    return math.prod(aval.shape) * (2 if jnp.dtype(aval.dtype).itemsize == 8 else 1)


def pack(values: Sequence[Any]) -> Any:
    """Values of any numeric dtype -> one uint32 vector, bit for bit."""
    return jnp.concatenate([_words(jnp.asarray(v)) for v in values]) if values else jnp.zeros((0,), jnp.uint32)


def unpack(words: Any, avals: Sequence[Any]) -> list[Any]:
    """The inverse of ``pack`` for values of the given shapes and dtypes (trailing words are padding)."""
    values, start = [], 0
    for aval in avals:
        count = num_words(aval)
        values.append(_value(words[start : start + count], aval))
        start += count
    return values


def _words(value: Any) -> Any:
    size = value.dtype.itemsize
    if value.dtype == jnp.bool_ or (size < 4 and jnp.issubdtype(value.dtype, jnp.integer)):
        value = value.astype(jnp.int32)
    elif size < 4:
        value = value.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(value.reshape(-1), jnp.uint32).reshape(-1)


def _value(words: Any, aval: Any) -> Any:
    dtype = jnp.dtype(aval.dtype)
    if dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(words.reshape(-1, 2), dtype).reshape(aval.shape)
    wide = dtype
    if dtype == jnp.bool_ or dtype.itemsize < 4:
        wide = jnp.dtype(jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32)
    return jax.lax.bitcast_convert_type(words, wide).astype(dtype).reshape(aval.shape)
