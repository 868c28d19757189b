"""How evenly the experts are used: a count, and the auxiliary loss that evens it out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import piper_jax as piper
from piper_jax.models.routing import Routes


def expert_load(experts: Int[Array, "tokens top_k"], num_experts: int) -> Int[Array, " experts"]:
    """How many choices of a slice are of each expert, the dropped ones included."""
    return jax.nn.one_hot(experts, num_experts, dtype=jnp.int32).sum((0, 1))


def balance_loss(routes: Routes, load: Int[Array, " experts"]) -> Float[Array, ""]:
    """``experts * sum(share * probability)`` over a whole microbatch: 1 where all experts are used alike.

    ``share`` is the part of the choices that are of an expert, ``probability`` the mean of the router's own, through
    which the gradient flows (Switch Transformer, arXiv 2101.03961, section 2.2). A product of two means is not the
    mean of products, so both are taken over all replicas of the microbatch: the gradient of the router then is the
    same however the microbatch is divided.
    """
    share = load / routes.experts.size
    probability = routes.probabilities.mean(0)
    share, probability = piper.mean_over_replicas((share.astype(probability.dtype), probability))
    return load.size * (share * probability).sum()
