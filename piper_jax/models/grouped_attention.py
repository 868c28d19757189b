"""Grouped-query attention with normalized queries and keys, as in Qwen3."""

from __future__ import annotations

import math

import jax
from flax import nnx
from jaxtyping import Array, Float

from piper_jax.models.attention import Packing, rotary, same_document
from piper_jax.models.moe_config import MoEConfig


class GroupedAttention(nnx.Module):
    """Causal attention in which several heads of queries share one of keys and values (arXiv 2305.13245).

    Queries and keys pass an RMSNorm of their own, over each head, before the rotary positions (arXiv 2505.09388).
    """

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        dim, dtypes = config.dim, {"dtype": config.compute_dtype, "param_dtype": config.param_dtype}
        queries, keys = config.num_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        narrow = nnx.initializers.normal(0.02)
        residual = nnx.initializers.normal(0.02 / math.sqrt(2 * config.num_layers))
        self.query = nnx.Linear(dim, queries, use_bias=False, kernel_init=narrow, **dtypes, rngs=rngs)
        self.key = nnx.Linear(dim, keys, use_bias=False, kernel_init=narrow, **dtypes, rngs=rngs)
        self.value = nnx.Linear(dim, keys, use_bias=False, kernel_init=narrow, **dtypes, rngs=rngs)
        self.norm_query = nnx.RMSNorm(config.head_dim, **dtypes, rngs=rngs)
        self.norm_key = nnx.RMSNorm(config.head_dim, **dtypes, rngs=rngs)
        self.out = nnx.Linear(queries, dim, use_bias=False, kernel_init=residual, **dtypes, rngs=rngs)
        self.head_dim, self.rope_base = config.head_dim, config.rope_base

    def __call__(
        self, x: Float[Array, "batch length dim"], packing: Packing | None = None
    ) -> Float[Array, "batch length dim"]:
        batch, length, _ = x.shape
        query, key, value = (
            project(x).reshape(batch, length, -1, self.head_dim) for project in (self.query, self.key, self.value)
        )
        positions = None if packing is None else packing.positions
        query = rotary(self.norm_query(query), self.rope_base, positions)
        key = rotary(self.norm_key(key), self.rope_base, positions)
        attended = jax.nn.dot_product_attention(query, key, value, mask=same_document(packing), is_causal=True)
        return self.out(attended.reshape(batch, length, -1))
