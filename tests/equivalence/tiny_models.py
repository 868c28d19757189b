"""Tiny models. Widths are a handful, so that compiling them is nearly all that a test costs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import piper_jax as piper

VOCAB, DIM, LENGTH, ROWS = 11, 6, 3, 24


class Block(nnx.Module):
    def __init__(self, dim: int, *, dropout: float = 0.0, rngs: nnx.Rngs):
        self.up = nnx.Linear(dim, 2 * dim, rngs=rngs)
        self.down = nnx.Linear(2 * dim, dim, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, x: Any) -> Any:
        y = self.down(jax.nn.silu(self.up(x)))
        return x + (self.dropout(y) if self.dropout is not None else y)


class Tower(nnx.Module):
    """Embedding, residual blocks, head.

    Args:
      tied: the head is the transposed embedding.
      skip: what the embedding gives is also added before the head.
      regions: annotate every block.
      dropout: rate in every other block.
    """

    def __init__(
        self,
        layers: int = 4,
        *,
        dim: int = DIM,
        tied: bool = False,
        skip: bool = False,
        regions: bool = True,
        dropout: float = 0.0,
        seed: int = 0,
    ):
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(VOCAB, dim, rngs=rngs)
        self.layers = nnx.List([Block(dim, dropout=dropout * (i % 2), rngs=rngs) for i in range(layers)])
        self.head = None if tied else nnx.Linear(dim, VOCAB, use_bias=False, rngs=rngs)
        self.skip, self.regions = skip, regions

    def __call__(self, tokens: Any) -> Any:
        first = x = self.embed(tokens)
        for layer in self.layers:
            if self.regions:
                with piper.annotate("PP"):
                    x = layer(x)
            else:
                x = layer(x)
        x = x + first if self.skip else x
        return self.embed.attend(x) if self.head is None else self.head(x)


def tokens(rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    """Token batches ``[rows, LENGTH]``; ``mask`` marks about two thirds of the targets, unevenly over the rows."""
    random = np.random.default_rng(seed)
    shape = (rows, LENGTH)
    return {
        "x": random.integers(0, VOCAB, shape, dtype=np.int32),
        "y": random.integers(0, VOCAB, shape, dtype=np.int32),
        "mask": random.random(shape) < np.linspace(0.3, 1.0, rows)[:, None],
    }


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Of every token, ``[rows, LENGTH]``."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def mean_loss(model: Any, batch: Any) -> Any:
    return cross_entropy(model(batch["x"]), batch["y"]).mean()


def weighted_loss(model: Any, batch: Any) -> Any:
    mask = batch["mask"].astype(jnp.float32)
    return piper.WeightedLoss((cross_entropy(model(batch["x"]), batch["y"]) * mask).sum(), mask.sum())
