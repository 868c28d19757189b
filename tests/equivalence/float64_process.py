"""Run in a process of its own: float64 is a setting of the whole process. Exits with 1 where something differs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from oracle import Problem, assert_equivalent, strategy

import piper_jax as piper

DTYPES = {"dtype": jnp.float64, "param_dtype": jnp.float64}
DIM, VOCAB = 6, 11


class Net(nnx.Module):
    """Tied embedding, dropout, a skip over all stages; every dtype set."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs, **DTYPES)
        self.layers = nnx.List([nnx.Linear(DIM, DIM, rngs=rngs, **DTYPES) for _ in range(4)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        first = x = self.embed(tokens)
        for layer in self.layers:
            with piper.annotate("PP"):
                x = x + self.dropout(jnp.tanh(layer(x)))
        return self.embed.attend(x + first)


def loss(model: Net, batch: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return piper.WeightedLoss((losses * batch["mask"]).sum(), batch["mask"].sum())


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    x, y = (jax.random.randint(k, (16, 3), 0, VOCAB) for k in keys[:2])
    batch = {"x": x, "y": y, "mask": jax.random.uniform(keys[2], (16, 3), jnp.float64)}
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(2e-2, eps=1e-2))
    problem = Problem(loss_fn=loss, params=Net(), batch=batch, optimizer=optimizer, precision="float64")
    assert {str(v.dtype) for v in jax.tree.leaves(nnx.state(problem.params, nnx.Param))} == {"float64"}
    assert_equivalent(problem, strategy(stages=4, data=2, microbatches=4))
    assert_equivalent(problem, strategy(stages=2, data=2, microbatches=4, schedule="GPipe"))


if __name__ == "__main__":
    main()
