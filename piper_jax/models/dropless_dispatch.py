"""Tokens sorted by expert, all of them kept (MegaBlocks, arXiv 2211.15841): for ``jax.lax.ragged_dot``."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def expert_order(experts: Int[Array, "tokens top_k"]) -> Int[Array, " choices"]:
    """The choices, numbered ``token * top_k + rank``, in the order of their experts, and of tokens within each."""
    return jnp.argsort(experts.reshape(-1), stable=True)


def sorted_tokens(
    x: Float[Array, "tokens dim"], order: Int[Array, " choices"], top_k: int
) -> Float[Array, "choices dim"]:
    """A copy of its token for each choice, in the order of the experts."""
    return x[order // top_k]


def unsorted(
    results: Float[Array, "choices dim"], order: Int[Array, " choices"], weights: Float[Array, "tokens top_k"]
) -> Float[Array, "tokens dim"]:
    """The weighted sum of what the experts gave for each token."""
    own = results[jnp.argsort(order)].reshape(*weights.shape, -1)
    return (own * weights[..., None].astype(own.dtype)).sum(1)
