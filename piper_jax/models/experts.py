"""The routed experts of one layer, stacked on the first dimension of each parameter."""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from piper_jax.models.moe_config import MoEConfig


class Experts(nnx.Module):
    """SwiGLU MLPs, one for each expert: ``gate`` and ``up`` ``[experts, dim, hidden]``, ``down`` its transpose."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        shape = (config.num_experts, config.dim, config.expert_dim)
        narrow = nnx.initializers.normal(0.02)
        residual = nnx.initializers.normal(0.02 / math.sqrt(2 * config.num_layers))
        self.gate = nnx.Param(narrow(rngs.params(), shape, config.param_dtype))
        self.up = nnx.Param(narrow(rngs.params(), shape, config.param_dtype))
        self.down = nnx.Param(residual(rngs.params(), (shape[0], shape[2], shape[1]), config.param_dtype))
        self.dtype = config.compute_dtype

    def __call__(self, x: Float[Array, "experts capacity dim"]) -> Float[Array, "experts capacity dim"]:
        """Each expert on its own places."""
        x = x.astype(self.dtype)
        return (jax.nn.silu(x @ self._of(self.gate)) * (x @ self._of(self.up))) @ self._of(self.down)

    def ragged(self, x: Float[Array, "choices dim"], sizes: Int[Array, " experts"]) -> Float[Array, "choices dim"]:
        """Each expert on its own rows: the first ``sizes[0]`` are of expert 0, and so on."""
        x = x.astype(self.dtype)
        gate = jax.lax.ragged_dot(x, self._of(self.gate), sizes)
        up = jax.lax.ragged_dot(x, self._of(self.up), sizes)
        return jax.lax.ragged_dot(jax.nn.silu(gate) * up, self._of(self.down), sizes)

    def _of(self, parameter: nnx.Param[Any]) -> jax.Array:
        return parameter[...].astype(self.dtype)
