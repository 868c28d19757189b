"""A model with every kind of state that a loss function may change."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import piper_jax as piper

DIM, ROWS, LAYERS = 6, 24, 4


class Seen(nnx.Variable):
    """Counts and means of what the slices of a step saw."""


class Layer(nnx.Module):
    """Every kind of carried state.

    BatchNorm, and a power iteration whose vector the forward pass itself uses, are carried from microbatch to
    microbatch; ``calls`` is changed by no batch; ``load`` is summed over the slices of a step, ``level`` averaged, and
    ``bias`` follows from what the last step left in ``load``.
    """

    def __init__(self, *, in_turn: bool, rngs: nnx.Rngs):
        self.linear = nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs)
        self.in_turn = in_turn
        if in_turn:
            self.norm = nnx.BatchNorm(DIM, momentum=0.8, rngs=rngs)
            self.vector = nnx.BatchStat(jax.random.normal(rngs.params(), (DIM,)))
            self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.load = Seen(jnp.ones(DIM, jnp.int32), carry="sum")
        self.bias = Seen(jnp.zeros(DIM), carry="mean")
        self.level = Seen(jnp.zeros(DIM, jnp.bfloat16), carry="mean")

    def __call__(self, x: Any) -> Any:
        y = self.linear(x)
        if self.in_turn:
            y = self.norm(y) / (1 + jnp.abs(self.vector[...]).sum())
            turned = jax.lax.stop_gradient(self.linear.kernel[...].T @ self.vector[...] + 0.1 * y.mean(0))
            self.vector[...] = turned / jnp.linalg.norm(turned)
            self.calls[...] = self.calls[...] + 1
        load = self.load[...]  # whole numbers: the sign of their distance from the mean is exact
        self.bias[...] = self.bias[...] + 0.01 * jnp.sign(load.sum() - DIM * load)
        y = y + self.bias[...]
        self.load[...] = (y > 0).sum(0).astype(jnp.int32)
        self.level[...] = (0.5 * self.level[...] + (y**2).mean(0)).astype(jnp.bfloat16)
        return x + jnp.tanh(y)


class Net(nnx.Module):
    def __init__(self, *, in_turn: bool = True):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Layer(in_turn=in_turn, rngs=rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(DIM, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = layer(x)
        return self.head(x)


def regression(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def rows(count: int = ROWS) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(count, DIM)).astype("f"), "y": random.normal(size=(count, 2)).astype("f")}
