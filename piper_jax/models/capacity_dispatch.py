"""Tokens in a fixed number of places for each expert; what finds no place is dropped (GShard, arXiv 2006.16668)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def expert_capacity(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Places of each expert for the tokens of one slice: ``factor`` times an equal share of the choices, at least 1."""
    return max(math.ceil(factor * num_tokens * top_k / num_experts), 1)


def places(experts: Int[Array, "tokens top_k"], num_experts: int, capacity: int) -> Int[Array, "tokens top_k"]:
    """The place of each choice, ``expert * capacity + position``, or ``num_experts * capacity`` if it is dropped.

    Tokens are placed in their order, each with all its choices: a full expert drops what comes last. So nothing that
    a later token chooses can move an earlier one out of its place, and the model stays causal.
    """
    choices = experts.reshape(-1)
    ones = jax.nn.one_hot(choices, num_experts, dtype=jnp.int32)
    position = (ones * jnp.cumsum(ones, axis=0)).sum(-1) - 1
    place = jnp.where(position < capacity, choices * capacity + position, num_experts * capacity)
    return place.reshape(experts.shape)


def dispatched(
    x: Float[Array, "tokens dim"], place: Int[Array, "tokens top_k"], num_experts: int, capacity: int
) -> Float[Array, "experts capacity dim"]:
    """Each token at its places; empty places are zero."""
    num_tokens = x.shape[0]
    token = jnp.broadcast_to(jnp.arange(num_tokens)[:, None], place.shape)
    source = jnp.full(num_experts * capacity, num_tokens).at[place].set(token, mode="drop")
    return x.at[source].get(mode="fill", fill_value=0).reshape(num_experts, capacity, -1)


def combined(
    results: Float[Array, "experts capacity dim"],
    place: Int[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
) -> Float[Array, "tokens dim"]:
    """The weighted sum of what the experts gave for each token; a dropped choice adds nothing."""
    flat = results.reshape(-1, results.shape[-1])
    chosen = flat.at[place].get(mode="fill", fill_value=0)
    return (chosen * weights[..., None].astype(chosen.dtype)).sum(1)


def dropped_fraction(place: Int[Array, "tokens top_k"], num_experts: int, capacity: int) -> Float[Array, ""]:
    """The part of all choices that found no place."""
    return (place == num_experts * capacity).mean(dtype=jnp.float32)
