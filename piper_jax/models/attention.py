"""Causal self-attention with rotary positions, as plain functions that all models use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

ROTARY_BASE = 10_000.0


class Packing(NamedTuple):
    """Where the documents of packed sequences lie; None in its place means one document a sequence.

    Attributes:
      segment_ids: which document of the sequence a token is of.
      positions: of a token in its document, from 0.
    """

    segment_ids: Int[Array, "batch length"]
    positions: Int[Array, "batch length"]

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Packing | None:
        """That of a batch, if it has any."""
        return cls(batch["segment_ids"], batch["positions"]) if "segment_ids" in batch else None


def same_document(packing: Packing | None) -> Bool[Array, "batch 1 length length"] | None:
    """Which key each query may see, as a mask for all heads; None: all of them."""
    if packing is None:
        return None
    ids = packing.segment_ids
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def causal_attention(
    qkv: Float[Array, "batch length width"], num_heads: int, packing: Packing | None = None
) -> Float[Array, "batch length dim"]:
    """Attention of each position to itself and those before it, of the same document.

    Args:
      qkv: queries, keys and values side by side, ``width = 3 * dim``.
      num_heads: divides ``dim`` into heads of even width.
    """
    batch, length, width = qkv.shape
    query, key, value = jnp.split(qkv.reshape(batch, length, 3 * num_heads, width // (3 * num_heads)), 3, axis=2)
    positions = None if packing is None else packing.positions
    query, key = rotary(query, positions=positions), rotary(key, positions=positions)
    attended = jax.nn.dot_product_attention(query, key, value, mask=same_document(packing), is_causal=True)
    return attended.reshape(batch, length, width // 3)


def rotary(
    x: Float[Array, "batch length heads dim"],
    base: float = ROTARY_BASE,
    positions: Int[Array, "batch length"] | None = None,
) -> Float[Array, "batch length heads dim"]:
    """Turns each pair of features by an angle that grows with the position (RoFormer, arXiv 2104.09864).

    Args:
      base: the slowest pair turns by about ``1 / base`` a position.
      positions: None means 0, 1, 2, ...
    """
    length, dim = x.shape[1], x.shape[-1]
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    frequency = base ** (-jnp.arange(0, dim, 2, dtype=dtype) / dim)
    places = jnp.arange(length, dtype=dtype) if positions is None else positions.astype(dtype)
    angle = places[..., None, None] * frequency
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1).astype(x.dtype)
