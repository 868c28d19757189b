"""Which experts each token goes to, and with which weights."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from piper_jax.models.moe_config import MoEConfig


class Routes(NamedTuple):
    """The choices of a router.

    Attributes:
      experts: the chosen experts of each token, best first.
      weights: of their results; they add up to one for each token, and gradients flow through them.
      probabilities: of all experts, for the auxiliary loss; they add up to one for each token.
    """

    experts: Int[Array, "tokens top_k"]
    weights: Float[Array, "tokens top_k"]
    probabilities: Float[Array, "tokens experts"]


class RoutingBias(nnx.Variable):
    """The bias of sigmoid routing: an input of the loss function that has no gradient, not a parameter."""


class Router(nnx.Module):
    """A linear score of each expert, in float32 or wider whatever the activations are.

    ``sigmoid`` routing has a bias that is added to the scores for the choice only, never to the weights (DeepSeek-V3,
    arXiv 2412.19437, section 2.1.2). It stays what it is initialized or set to: raising that of idle experts from
    step to step needs state that the loss function changes, which is not planned yet.
    """

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        dtype = jnp.promote_types(config.compute_dtype, jnp.float32)
        self.scores = nnx.Linear(
            config.dim, config.num_experts, use_bias=False, kernel_init=nnx.initializers.normal(0.02), dtype=dtype,
            param_dtype=config.param_dtype, rngs=rngs,
        )  # fmt: skip
        self.sigmoid, self.top_k = config.routing == "sigmoid", config.top_k
        if self.sigmoid:
            self.bias = RoutingBias(jnp.zeros(config.num_experts, config.param_dtype))

    def __call__(self, x: Float[Array, "tokens dim"]) -> Routes:
        scores = self.scores(x)
        if self.sigmoid:
            return sigmoid_routes(scores, self.bias[...], self.top_k)
        return softmax_routes(scores, self.top_k)


def softmax_routes(scores: Float[Array, "tokens experts"], top_k: int) -> Routes:
    """The most probable experts; their probabilities, divided by their sum, are the weights."""
    probabilities = jax.nn.softmax(scores)
    chosen, experts = jax.lax.top_k(probabilities, top_k)
    return Routes(experts, chosen / chosen.sum(-1, keepdims=True), probabilities)


def sigmoid_routes(scores: Float[Array, "tokens experts"], bias: Float[Array, " experts"], top_k: int) -> Routes:
    """The experts whose sigmoid plus bias is largest; their sigmoids, without it, divided by their sum, are weights."""
    affinities = jax.nn.sigmoid(scores)
    _, experts = jax.lax.top_k(jax.lax.stop_gradient(affinities) + bias.astype(affinities.dtype), top_k)
    chosen = jnp.take_along_axis(affinities, experts, axis=-1)
    weights = chosen / chosen.sum(-1, keepdims=True)
    return Routes(experts, weights, affinities / affinities.sum(-1, keepdims=True))
