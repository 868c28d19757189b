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


def several_dtypes(params: list[dict[str, Any]], batch: Any) -> Any:
    """Complex and real leaves of several sizes in one layer."""
    x = batch["x"]
    for layer in params:
        with piper.annotate("PP"):
            x = x + jnp.tanh(jnp.abs(x @ layer["wave"]) ** 2 * (1 + layer["gain"]) + layer["shift"])
    return (x**2).mean()


def check_several_dtypes() -> None:
    """Each collective of the plan is one, whatever the dtypes of a layer."""
    key = jax.random.key(1)
    one = {"wave": jax.random.normal(key, (DIM, DIM), jnp.complex128) / 4, "shift": jnp.full(DIM, 0.1)}
    params = [{**one, "gain": jnp.ones(DIM, jnp.float32)} for _ in range(2)]
    batch = {"x": jax.random.normal(key, (16, DIM), jnp.float64)}
    problem = Problem(loss_fn=several_dtypes, params=params, batch=batch, optimizer=optax.adam(1e-2, eps=1e-2))
    train = assert_equivalent(problem, strategy(stages=2, data=2, microbatches=2, zero_stage=2))
    planned = sum(node.op.startswith("reduce_scatter") for node in train.plan.complete().nodes)
    compiled = (i.program.hlo().count(" reduce-scatter(") for i in train.instructions() if i.program is not None)
    assert planned == sum(compiled) == 3 * 2 * 2


def main() -> None:
    check_several_dtypes()
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
