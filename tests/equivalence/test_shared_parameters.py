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
from piper_jax.lowering.instruction import Instruction, require_unspoiled
from piper_jax.lowering.keys import Key


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


# -- read without a gradient --------------------------------------------------------------------------------
def stopped(params: Any, batch: Any) -> Any:
    """Two kernels are read by the first stage, which gives them no gradient, and trained by the last."""
    x = batch["x"] @ jax.lax.stop_gradient(params[3])
    nearest = jnp.argmax(batch["x"] @ params[2].T, axis=1)
    for kernel in params:
        with piper.annotate("PP"):
            x = x + jnp.tanh(x @ kernel)
    return ((x - jax.nn.one_hot(nearest, DIM)) ** 2).mean()


@pytest.mark.parametrize(("stages", "data", "schedule"), [(2, 2, "1F1B"), (2, 1, "DualPipeV")])
def test_a_stage_may_read_what_another_one_trains(stages: int, data: int, schedule: str) -> None:
    """Its backward adds nothing to that gradient, so it may run after the gradient was reduced."""
    params = [0.3 * jax.random.normal(jax.random.key(k), (DIM, DIM)) for k in range(4)]
    batch = {"x": jax.random.normal(jax.random.key(9), (16, DIM))}
    problem = Problem(loss_fn=stopped, params=params, batch=batch, optimizer=momentum())
    train = assert_equivalent(problem, strategy(stages=stages, data=data, microbatches=4, schedule=schedule))
    passes = (i for i in train.instructions() if i.role == "compute" and "B0" in i.label)
    assert {k.item for i in passes for k in i.writes if k.kind == "accumulator"} <= {0, 1}


def test_what_was_overwritten_is_not_read() -> None:
    """A fault of the lowering would end the process in the middle of a step; it is found before."""
    key, other = Key("accumulator", "g0", 3), Key("gradient", "g0", 3)
    reduce = Instruction(role="joint", label="reduce", call=tuple, reads=(key,), writes=(other,), overwrites=(key,))
    late = Instruction(role="compute", label="B0", call=tuple, reads=(key,), writes=(key,), overwrites=(key,))
    require_unspoiled([late, late, reduce])
    with pytest.raises(piper.RuntimeFault, match="B0 reads accumulator 3 on g0, whose memory reduce has taken over"):
        require_unspoiled([late, reduce, late])
