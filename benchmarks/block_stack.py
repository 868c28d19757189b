"""The model that the benchmarks share, and the plain ``jax.jit`` step that they are held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import piper_jax as piper


class Block(nnx.Module):
    """Self-attention, then a GELU MLP four times as wide, both residual."""

    def __init__(self, dim: int, num_heads: int, rngs: nnx.Rngs):
        self.num_heads = num_heads
        self.norm_attention, self.norm_mlp = nnx.RMSNorm(dim, rngs=rngs), nnx.RMSNorm(dim, rngs=rngs)
        self.qkv = nnx.Linear(dim, 3 * dim, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(dim, dim, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[rows, length, dim]`` -> the same."""
        heads = self.qkv(self.norm_attention(x)).reshape(*x.shape[:2], 3 * self.num_heads, -1)
        attended = jax.nn.dot_product_attention(*jnp.split(heads, 3, axis=2), is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm_mlp(x))))


class Perceptron(nnx.Module):
    """One residual dense layer: as little compute as a stage can have."""

    def __init__(self, dim: int, rngs: nnx.Rngs):
        self.dense = nnx.Linear(dim, dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.dense(x))


class Stack(nnx.Module):
    """Equal layers one after another, each a region."""

    def __init__(self, layers: Sequence[nnx.Module]):
        self.layers = nnx.List(layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            with piper.annotate("PP"):
                x = layer(x)
        return x


def block_stack(num_layers: int, dim: int) -> Stack:
    """``num_layers`` attention and MLP blocks with heads of width 64, from a fixed seed."""
    rngs = nnx.Rngs(0)
    return Stack([Block(dim, max(1, dim // 64), rngs) for _ in range(num_layers)])


def perceptron_stack(num_layers: int, dim: int) -> Stack:
    """``num_layers`` dense layers, from a fixed seed."""
    rngs = nnx.Rngs(0)
    return Stack([Perceptron(dim, rngs) for _ in range(num_layers)])


def loss_fn(model: Stack, batch: dict[str, Any]) -> jax.Array:
    """Mean square of the difference to the targets."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def random_batch(*shape: int) -> dict[str, jax.Array]:
    """Inputs and targets of one shape, from a fixed seed."""
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.standard_normal(shape, dtype=np.float32)) for name in ("x", "y")}


def optimizer() -> optax.GradientTransformation:
    """Global-norm clipping and AdamW, as in most training runs."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


class PlainStep:
    """The same step as one ``jax.jit`` on one device: a scan over microbatches, then the update; state is donated."""

    def __init__(self, model: Stack, num_microbatches: int):
        self.graph, params, _ = nnx.split(model, nnx.Param, ...)
        self.num_microbatches, self.optimizer = num_microbatches, optimizer()
        params = jax.tree.map(jnp.copy, params)
        self.state = (params, self.optimizer.init(params))
        self.step = jax.jit(self._step, donate_argnums=0)

    def __call__(self, batch: dict[str, Any]) -> jax.Array:
        """Runs one step and returns its loss."""
        self.state, loss = self.step(self.state, batch)
        return loss

    def _step(self, state: Any, batch: Any) -> Any:
        params, moments = state
        split = jax.tree.map(lambda a: a.reshape(self.num_microbatches, -1, *a.shape[1:]), batch)

        def microbatch(carry: Any, rows: Any) -> Any:
            loss, grads = jax.value_and_grad(lambda p: loss_fn(nnx.merge(self.graph, p), rows))(params)
            return jax.tree.map(jnp.add, carry, (loss, grads)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(microbatch, zeros, split)
        loss, grads = jax.tree.map(lambda a: a / self.num_microbatches, (loss, grads))
        updates, moments = self.optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss


class PipelinedStep:
    """The step under a strategy."""

    def __init__(self, model: Stack, batch: dict[str, Any], strategy: piper.Strategy):
        self.train = piper.parallelize(loss_fn, model, batch, optimizer=optimizer(), strategy=strategy)
        self.state = self.train.init(model)

    def __call__(self, batch: dict[str, Any]) -> jax.Array:
        """Dispatches one step and returns its loss."""
        self.state, metrics = self.train.step(self.state, batch)
        return metrics["loss"]
