"""The gated MLP of one layer: dense, or the experts that every token goes to."""

from __future__ import annotations

import math

import jax
from flax import nnx
from jaxtyping import Array, Float

from piper_jax.models.moe_config import MoEConfig


class SwiGLU(nnx.Module):
    """``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202), without biases."""

    def __init__(self, config: MoEConfig, hidden_dim: int, *, rngs: nnx.Rngs):
        dtypes = {"dtype": config.compute_dtype, "param_dtype": config.param_dtype}
        narrow = nnx.initializers.normal(0.02)
        residual = nnx.initializers.normal(0.02 / math.sqrt(2 * config.num_layers))
        self.gate = nnx.Linear(config.dim, hidden_dim, use_bias=False, kernel_init=narrow, **dtypes, rngs=rngs)
        self.up = nnx.Linear(config.dim, hidden_dim, use_bias=False, kernel_init=narrow, **dtypes, rngs=rngs)
        self.down = nnx.Linear(hidden_dim, config.dim, use_bias=False, kernel_init=residual, **dtypes, rngs=rngs)

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
