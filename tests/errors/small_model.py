"""A model that works, to be given what does not."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import piper_jax as piper

ROWS, DIM = 16, 4


def params(layers: int = 4, dim: int = DIM) -> list[Any]:
    return [jnp.eye(dim) * 0.5 for _ in range(layers)]


def batch(rows: int = ROWS, dim: int = DIM) -> dict[str, Any]:
    return {"x": np.ones((rows, dim), np.float32)}


def apply(kernels: Any, batch: Any) -> Any:
    x = batch["x"]
    for kernel in kernels:
        with piper.annotate("PP"):
            x = jnp.tanh(x @ kernel)
    return x


def loss(kernels: Any, batch: Any) -> Any:
    return apply(kernels, batch).mean()


def parallelized(loss_fn: Any = loss, *, rows: int = ROWS, devices: Any = None, **degrees: Any) -> piper.Train:
    return piper.parallelize(
        loss_fn, params(), batch(rows), optimizer=optax.sgd(0.1), strategy=piper.Strategy(**degrees), devices=devices
    )
