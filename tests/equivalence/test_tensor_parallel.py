"""Parameters divided over a tensor axis by their metadata: every step is that of one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P
from oracle import Problem, assert_equivalent, strategy
from test_mixtures import problem as mixture
from tiny_models import DIM, Tower, mean_loss, tokens

import piper_jax as piper

BLOCK = {"layers.*.up.kernel": 1, "layers.*.up.bias": 0, "layers.*.down.kernel": 0}
WORDS = {"embed.embedding": 1}


def divided(schedule: str = "1F1B", *, dims: Any = None, rules: Any = None, **degrees: int) -> piper.Strategy:
    known = {name: value for name, value in (("dims", dims), ("rules", rules)) if value is not None}
    plain = strategy(**degrees)
    return piper.Strategy(
        data_parallel=plain.data_parallel, pipeline_parallel=plain.pipeline_parallel, tensor_parallel=2,
        expert_parallel=plain.expert_parallel, zero_stage=plain.zero_stage, num_microbatches=plain.num_microbatches,
        directives=(piper.directive(schedule), piper.directive("TensorParallel", **known)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def tied() -> Problem:
    return Problem(loss_fn=mean_loss, params=Tower(tied=True), batch=tokens())


@pytest.mark.parametrize(
    ("schedule", "degrees"),
    [
        ("1F1B", {"stages": 2, "data": 2, "microbatches": 3, "zero_stage": 1}),
        ("ZBH1", {"stages": 2, "data": 1, "microbatches": 3}),
        pytest.param("DualPipe", {"stages": 2, "data": 2, "microbatches": 6, "zero_stage": 3}, marks=pytest.mark.full),
        pytest.param("DualPipeV", {"stages": 2, "data": 2, "microbatches": 4, "zero_stage": 2}, marks=pytest.mark.full),
    ],
)
def test_by_path_and_tied(tied: Problem, schedule: str, degrees: dict[str, int]) -> None:
    train = assert_equivalent(tied, divided(schedule, dims=BLOCK | WORDS, **degrees))
    whole = {leaf.path: leaf.nbytes for leaf in train.plan.source.state.leaves}
    held = train.init(tied.params).arrays
    shards = [min(s.data.nbytes for s in a.addressable_shards) for a in held]
    if not degrees.get("zero_stage"):
        assert shards.count(whole["layers.0.up.kernel"] // 2) >= 2 * len(train.plan.dag.ops)


@pytest.mark.full
def test_experts_too() -> None:
    found = mixture({"num_layers": 1})
    dims = {"*.experts.gate": 2, "*.experts.up": 2, "*.experts.down": 1}
    assert_equivalent(found, divided(dims=dims, expert_parallel=2, data=2, microbatches=1))


class Named(nn.Module):
    """A Linen model whose dimensions have names, by which it may divide activations."""

    constrained: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.initializers.lecun_normal()
        for index in range(2):
            with piper.annotate("PP"):
                up = nn.Dense(2 * DIM, kernel_init=nn.with_partitioning(init, ("embed", "mlp")), name=f"up_{index}")
                down = nn.Dense(DIM, kernel_init=nn.with_partitioning(init, ("mlp", "embed")), name=f"down_{index}")
                h = up(x)
                if self.constrained:
                    h = jax.lax.with_sharding_constraint(h, P(None, "mlp"))
                x = x + down(jax.nn.silu(h))
        return x


def regression(params: Any, batch: Any, constrained: bool = True) -> Any:
    return ((Named(constrained).apply(params, batch["x"]) - batch["y"]) ** 2).mean()


def test_by_the_metadata_of_linen() -> None:
    random = np.random.default_rng(0)
    batch = {name: random.normal(size=(16, DIM)).astype("f") for name in "xy"}
    params = Named().init(jax.random.key(0), jnp.ones((1, DIM)))
    found = Problem(loss_fn=regression, params=params, batch=batch)
    train = assert_equivalent(found, divided(stages=2, data=2, microbatches=2))
    assert train.collectives()["F0 g0"] == {"all_reduce": 1}
    state = train.init(params)
    doubled = train.evaluate(state, batch, lambda p, b: 2 * regression(p, b))["loss"]
    np.testing.assert_allclose(doubled, 2 * regression(params, batch, False), rtol=1e-5)


def test_by_the_names_of_nnx_and_rules() -> None:
    with nnx.use_eager_sharding(False):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "wide"))
        made = nnx.Linear(DIM, 4, kernel_init=init, rngs=nnx.Rngs(0))
    plan = piper.trace(lambda m, b: (m(b["x"]) ** 2).mean(), made, {"x": np.ones((8, DIM), np.float32)})
    with pytest.raises(piper.DirectiveError, match="names of dimensions: embed, wide"):
        plan.shard(piper.where(), axis="tensor")
    found = plan.shard(piper.where(), axis="tensor", rules={"wide": "tensor", "embed": None})
    assert [leaf.tensor_dim for b in found.dag.buckets.values() for leaf in b.leaves] == [None, 1]


def in_parts(x: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, P(("data", "expert"), "tensor", None))


@jax.custom_vjp
def halved(x: Any) -> Any:
    return in_parts(x / 2)


halved.defvjp(lambda x: (halved(x), None), lambda _, given: (in_parts(given / 2),))


@jax.checkpoint
def again(x: Any, t: Any) -> Any:
    return halved(x) + t * jax.vmap(lambda row: jax.lax.with_sharding_constraint(row, P("tensor")))(x), None


def everywhere(x: Any) -> Any:
    """Constraints in a derivative, a checkpoint, a loop, a branch, and in none."""
    x = jax.lax.scan(again, x, jnp.full(2, 0.5))[0]
    return in_parts(jax.lax.cond(jnp.isfinite(x).all(), in_parts, jnp.negative, x))


class Divided(nnx.Module):
    """Attention without weights over a sequence that the tensor axis divides between matrix products."""

    def __init__(self, divided: bool):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(2)])
        self.divided = divided

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            with piper.annotate("PP"):
                if self.divided:
                    x = everywhere(x)
                h = jax.nn.gelu(layer(x))
                x = x + jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", h, h)) @ h
        return x


def test_sequences_that_the_model_divides() -> None:
    x = np.random.default_rng(0).normal(size=(8, 4, DIM)).astype(np.float32)

    def loss_fn(model: Any, batch: Any) -> Any:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    found = []
    for whether in (False, True):
        tested = Problem(loss_fn=loss_fn, params=Divided(whether), batch={"x": x, "y": np.sin(x)})
        dims = {"layers.*.kernel": 1, "layers.*.bias": 0}
        train = assert_equivalent(tested, divided(dims=dims, stages=2, data=2, microbatches=2))
        found.append(train.collectives())
    whole, parts = (counts["F0 g0"] for counts in found)
    assert parts["all_gather"] > whole["all_gather"]
