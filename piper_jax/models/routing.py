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


class RoutedLoad(nnx.Variable):
    """How many choices of the last step were of each expert."""


class Router(nnx.Module):
    """A linear score of each expert, in float32 or wider whatever the activations are.

    ``sigmoid`` routing has a bias that is added to the scores for the choice only, never to the weights (DeepSeek-V3,
    arXiv 2412.19437, section 2.1.2). It stays what it is initialized or set to, unless load is balanced: then a step
    begins by moving it towards the experts that got less than an equal share of the step before. Both are state that
    steps carry on: loads are summed over all slices of a step, all of which see the same bias.
    """

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        dtype = jnp.promote_types(config.compute_dtype, jnp.float32)
        self.scores = nnx.Linear(
            config.dim, config.num_experts, use_bias=False, kernel_init=nnx.initializers.normal(0.02), dtype=dtype,
            param_dtype=config.param_dtype, rngs=rngs,
        )  # fmt: skip
        self.sigmoid, self.top_k = config.routing == "sigmoid", config.top_k
        self.rate = config.bias_rate if config.load_balancing == "dynamic" else 0.0
        if self.sigmoid:
            self.bias = RoutingBias(jnp.zeros(config.num_experts, dtype), carry="mean")
        if self.rate:
            self.load = RoutedLoad(jnp.zeros(config.num_experts, jnp.int32), carry="sum")

    def __call__(self, x: Float[Array, "tokens dim"]) -> Routes:
        scores = self.scores(x)
        if not self.sigmoid:
            return softmax_routes(scores, self.top_k)
        if self.rate:
            self.bias[...] = balanced_bias(self.bias[...], self.load[...], self.rate)
        return sigmoid_routes(scores, self.bias[...], self.top_k)

    def observe(self, load: Int[Array, " experts"]) -> None:
        """Remembers how many choices of these tokens are of each expert, if the next step is to balance them."""
        if self.rate:
            self.load[...] = load


def balanced_bias(
    bias: Float[Array, " experts"], load: Int[Array, " experts"], rate: float
) -> Float[Array, " experts"]:
    """One step of balancing without an auxiliary loss (arXiv 2408.15664, algorithm 1).

    ``rate`` is added for experts that got less than an equal share of the choices, and taken from those that got more:
    in whole numbers, since the sign of a rounded mean less an equal share would depend on the compiler.
    """
    share, rest = jnp.divmod(load.sum(), load.size)
    less, more = load < share + (rest > 0), load > share
    return bias + rate * (less.astype(bias.dtype) - more.astype(bias.dtype))


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
