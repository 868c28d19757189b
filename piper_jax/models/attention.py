"""Causal self-attention with rotary positions, as plain functions that all models use."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ROTARY_BASE = 10_000.0


def causal_attention(qkv: Float[Array, "batch length width"], num_heads: int) -> Float[Array, "batch length dim"]:
    """Attention of each position to itself and those before it.

    Args:
      qkv: queries, keys and values side by side, ``width = 3 * dim``.
      num_heads: divides ``dim`` into heads of even width.
    """
    batch, length, width = qkv.shape
    query, key, value = jnp.split(qkv.reshape(batch, length, 3 * num_heads, width // (3 * num_heads)), 3, axis=2)
    query, key = rotary(query), rotary(key)
    return jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(batch, length, width // 3)


def rotary(
    x: Float[Array, "batch length heads dim"], base: float = ROTARY_BASE
) -> Float[Array, "batch length heads dim"]:
    """Turns each pair of features by an angle that grows with the position (RoFormer, arXiv 2104.09864).

    Args:
      base: the slowest pair turns by about ``1 / base`` a position.
    """
    length, dim = x.shape[1], x.shape[-1]
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    frequency = base ** (-jnp.arange(0, dim, 2, dtype=dtype) / dim)
    angle = jnp.arange(length, dtype=dtype)[:, None, None] * frequency
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1).astype(x.dtype)
