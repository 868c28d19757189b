"""Where stages begin: uneven cuts, skips over stages, no regions at all, one cached jit called many times."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from oracle import Problem, assert_equivalent, strategy
from tiny_models import DIM, Block, Tower, cross_entropy, mean_loss, tokens

import piper_jax as piper
from piper_jax.ir.nodes import Send


# -- uneven ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", [pytest.param("GPipe", marks=pytest.mark.full), "1F1B"])
def test_seven_layers_on_three_stages(schedule: str) -> None:
    problem = Problem(loss_fn=mean_loss, params=Tower(layers=7), batch=tokens())
    train = assert_equivalent(problem, strategy(stages=3, data=2, microbatches=4, schedule=schedule))
    units = sorted(unit for op in train.plan.dag.ops.values() for unit in op.units)
    assert units == list(range(7))


# -- skips ----------------------------------------------------------------------------------------------
def test_a_skip_from_first_to_last_stage_is_sent_directly() -> None:
    problem = Problem(loss_fn=mean_loss, params=Tower(skip=True), batch=tokens())
    train = assert_equivalent(problem, strategy(stages=4, data=2, microbatches=4))
    sends = [n for n in train.plan.complete().nodes.values() if isinstance(n, Send) and n.id.MB == 0]
    routes = {(n.id.PASS, str(n.group), n.peer): len(n.values) for n in sends}
    neighbours = {("F", f"g{s}", f"g{s + 1}"): 1 for s in range(3)} | {("B", f"g{s + 1}", f"g{s}"): 1 for s in range(3)}
    assert routes == neighbours | {("F", "g0", "g3"): 1, ("B", "g3", "g0"): 1}


# -- no regions -----------------------------------------------------------------------------------------
@piper.annotate(data_parallel=2, pipeline_parallel=4)
class Plain(nnx.Module):
    """No region inside: only degrees on the class, over a plain list of layers."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, DIM, rngs=rngs)
        self.layers = nnx.List([Block(DIM, rngs=rngs) for _ in range(8)])
        self.head = nnx.Linear(DIM, 11, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_degrees_on_the_class_are_enough() -> None:
    problem = Problem(loss_fn=mean_loss, params=Plain(), batch=tokens(32))
    train = assert_equivalent(problem, piper.Strategy.of(problem.params))
    assert (train.plan.num_stages, train.plan.num_microbatches, len(train.plan.groups)) == (4, 8, 4)
    costs = [
        op.flops_forward + op.flops_backward_input + op.flops_backward_weight for op in train.plan.dag.ops.values()
    ]
    assert max(costs) < 1.5 * sum(costs) / 4


def test_strategy_none_reads_the_class() -> None:
    model, batch = Plain(), tokens(32)
    train = piper.parallelize(mean_loss, model, batch)
    assert (train.plan.num_stages, len(train.plan.groups["g0"].devices)) == (4, 2)


# -- regions by decorator, regions in cached jits ---------------------------------------------------------
@piper.annotate("PP")
class MarkedBlock(Block):
    """Every call is a region."""


def test_a_module_class_as_region() -> None:
    model = Tower(regions=False)
    model.layers = nnx.List([MarkedBlock(DIM, rngs=nnx.Rngs(i)) for i in range(4)])
    problem = Problem(loss_fn=mean_loss, params=model, batch=tokens())
    train = assert_equivalent(problem, strategy(stages=4, microbatches=2))
    assert [op.units for op in train.plan.dag.ops.values()] == [(0,), (1,), (2,), (3,)]


@jax.jit
def _cached_layer(weights: Any, x: Any) -> Any:
    with piper.annotate("PP"):
        return x + jnp.tanh(x @ weights["in"]) @ weights["out"]


def _jitted_layers(params: Any, batch: Any) -> Any:
    x = params["embed"][batch["x"]]
    for weights in params["layers"]:
        x = _cached_layer(weights, x)
    return cross_entropy(x @ params["embed"].T, batch["y"]).mean()


def test_a_layer_under_one_cached_jit_called_many_times() -> None:
    """Such a layer is traced once, so its region is entered once in Python; it is four units all the same."""
    keys = jax.random.split(jax.random.key(0), 9)
    normal = jax.random.normal
    layers = [{"in": normal(keys[2 * i], (DIM, 8)), "out": normal(keys[2 * i + 1], (8, DIM)) * 0.3} for i in range(4)]
    params = {"embed": normal(keys[8], (11, DIM)), "layers": layers}
    problem = Problem(loss_fn=_jitted_layers, params=params, batch=tokens())
    train = assert_equivalent(problem, strategy(stages=4, data=2, microbatches=4))
    assert [op.units for op in train.plan.dag.ops.values()] == [(0,), (1,), (2,), (3,)]
