"""Parameters used at several places: one of them, three of equal shapes, on any placement."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from oracle import Problem, assert_equivalent, momentum, strategy
from tiny_models import DIM, Block, Tower, cross_entropy, mean_loss, tokens

import piper_jax as piper


@pytest.fixture(scope="module")
def tied() -> Problem:
    return Problem(loss_fn=mean_loss, params=Tower(tied=True), batch=tokens())


@pytest.mark.parametrize(("stages", "data"), [(1, 2), (2, 1), (4, 2)])
def test_tied_embedding(tied: Problem, stages: int, data: int) -> None:
    train = assert_equivalent(tied, strategy(stages=stages, data=data, microbatches=4))
    (bucket,) = [
        b.name for b in train.plan.dag.buckets.values() if "embed.embedding" in {leaf.path for leaf in b.leaves}
    ]
    reductions = [n for n in train.plan.complete().nodes.values() if getattr(n, "bucket", None) == bucket]
    assert [str(n.group) for n in reductions] == [{1: "g0", 2: "g0+g1", 4: "g0+g3"}[stages]]


class ThreeTied(nnx.Module):
    """Three square kernels of one shape, each used by two layers that lie on different stages."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(3)
        self.shared = nnx.List([nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(3)])
        self.between = nnx.List([Block(DIM, rngs=rngs) for _ in range(6)])

    def __call__(self, x: Any) -> Any:
        for index, block in enumerate(self.between):
            with piper.annotate("PP"):
                x = block(x + jnp.tanh(self.shared[index % 3](x)))
        return x


def regression(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


@pytest.fixture(scope="module")
def three_tied() -> Problem:
    x, y = jax.random.normal(jax.random.key(0), (2, 24, DIM))
    return Problem(loss_fn=regression, params=ThreeTied(), batch={"x": x, "y": y}, optimizer=momentum(0.01))


@pytest.mark.parametrize(("stages", "data", "schedule"), [(3, 2, "1F1B"), (2, 3, "GPipe")])
def test_three_shared_kernels_of_equal_shape(three_tied: Problem, stages: int, data: int, schedule: str) -> None:
    assert_equivalent(three_tied, strategy(stages=stages, data=data, microbatches=4, schedule=schedule))


def test_one_variable_under_several_names() -> None:
    """NNX keys state by Variable: an embedding reached by two attributes is one leaf with one gradient."""
    model = Tower(tied=False)
    model.head = None
    model.again = model.embed

    def loss(m: Any, batch: Any) -> Any:
        x = m.embed(batch["x"])
        for layer in m.layers:
            with piper.annotate("PP"):
                x = layer(x)
        return cross_entropy(m.again.attend(x), batch["y"]).mean()

    problem = Problem(loss_fn=loss, params=model, batch=tokens())
    train = assert_equivalent(problem, strategy(stages=4, data=1, microbatches=4))
    paths = [leaf.path for bucket in train.plan.dag.buckets.values() for leaf in bucket.leaves]
    assert sum(path.endswith("embedding") for path in paths) == 1
