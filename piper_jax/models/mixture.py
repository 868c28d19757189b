"""A mixture of experts in the place of an MLP: route, dispatch, compute, combine."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

import piper_jax as piper
from piper_jax.models.balance import balance_loss, expert_load
from piper_jax.models.capacity_dispatch import combined, dispatched, dropped_fraction, expert_capacity, places
from piper_jax.models.dropless_dispatch import expert_order, sorted_tokens, unsorted
from piper_jax.models.experts import Experts
from piper_jax.models.moe_config import MoEConfig
from piper_jax.models.routing import Router, Routes
from piper_jax.models.swiglu import SwiGLU


class Mixture(nnx.Module):
    """Routed experts, and shared ones if there are any."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.router = Router(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)
        if config.num_shared_experts:
            self.shared = SwiGLU(config, config.num_shared_experts * config.expert_dim, rngs=rngs)

    def __call__(self, x: Float[Array, "batch length dim"]) -> tuple[Float[Array, "batch length dim"], dict[str, Any]]:
        """The tokens after the experts, and statistics of the layer.

        Returns:
          ``(y, {"balance_loss": scalar, "dropped_fraction": scalar, "expert_load": piper.Sum([experts])})``. Places
          are given within one slice of the batch, so dropping depends on the slices and on nothing else.
        """
        tokens = x.reshape(-1, x.shape[-1])
        routes = self.router(tokens)
        load = expert_load(routes.experts, self.config.num_experts)
        self.router.observe(load)
        statistics: dict[str, Any] = {"expert_load": piper.Sum(load)}
        if self.config.has_balance_loss:
            statistics["balance_loss"] = balance_loss(routes, load)
        if self.config.dispatch == "capacity":
            y, statistics["dropped_fraction"] = self._with_capacity(tokens, routes)
        else:
            order = expert_order(routes.experts)
            experts = piper.expert_region(self.experts.ragged, row_bound=self.config.row_bound)
            results = experts(sorted_tokens(tokens, order, self.config.top_k), load)
            y = unsorted(results, order, routes.weights)
        if self.config.num_shared_experts:
            y = y + self.shared(tokens)
        return y.reshape(x.shape), statistics

    def _with_capacity(
        self, tokens: Float[Array, "tokens dim"], routes: Routes
    ) -> tuple[Float[Array, "tokens dim"], Float[Array, ""]]:
        num_experts, top_k = self.config.num_experts, self.config.top_k
        capacity = expert_capacity(len(tokens), num_experts, top_k, self.config.capacity_factor)
        place = places(routes.experts, num_experts, capacity)
        results = piper.expert_region(self.experts)(dispatched(tokens, place, num_experts, capacity))
        return combined(results, place, routes.weights), dropped_fraction(place, num_experts, capacity)
