"""Stacked layers under ``scan``: the plan of a list of layers, the results of one device, and stacks given back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from oracle import Problem, adamw, assert_equivalent, strategy
from test_optimizers import decayed_kernels, factored

import piper_jax as piper

DIM, LAYERS = 8, 5
Loop = Callable[[Any, Any], Any]


def layer(x: Any, own: Any) -> Any:
    return x + jnp.tanh(x @ own["kernel"] + own["bias"])


def region(x: Any, own: Any) -> Any:
    with piper.annotate("PP"):
        return layer(x, own)


def parameters(loop: Loop | None) -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    kernel = 0.4 * jax.random.normal(keys[0], (LAYERS, DIM, DIM))
    layers: Any = {"kernel": kernel, "bias": 0.1 * jax.random.normal(keys[1], (LAYERS, DIM))}
    if loop is None:
        layers = [jax.tree.map(lambda v, k=k: v[k], layers) for k in range(LAYERS)]
    return {"embed": jnp.eye(DIM), "head": jax.random.normal(keys[2], (DIM, 1)), "layers": layers}


def batch() -> Any:
    x = jax.random.normal(jax.random.key(1), (16, DIM))
    return {"x": x, "y": jnp.sin(x[:, :1])}


def problem(loop: Loop | None, one: Callable[..., Any] = region, **given: Any) -> Problem:
    """Layers in a loop ``(x, stack) -> x`` or ``(x, balance)``, or a list of them."""

    def loss_fn(params: Any, batch: Any) -> Any:
        x, extra = batch["x"] @ params["embed"], 0.0
        if loop is None:
            for own in params["layers"]:
                x = one(x, own)
        else:
            found = loop(x, params["layers"])
            x, extra = found if isinstance(found, tuple) else (found, 0.0)
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2) + extra

    return Problem(loss_fn=loss_fn, params=parameters(loop), batch=batch(), **given)


def scanned(one: Callable[..., Any] = region, **options: Any) -> Loop:
    return lambda x, stack: jax.lax.scan(lambda x, own: (one(x, own), None), x, stack, **options)[0]


def with_balance(x: Any, stack: Any) -> Any:
    """Two carries, and a loss term of each layer; the last layer of the stack comes first."""

    def body(carry: Any, own: Any) -> Any:
        x, skip = carry
        return (region(x, own), skip + 0.1 * x), jnp.mean(x**2)

    (x, skip), terms = jax.lax.scan(body, (x, x), stack, reverse=True)
    return x + skip, 1e-2 * jnp.sum(terms)


def in_bfloat16(x: Any, stack: Any) -> Any:
    """Parameters cast as a stack, and another loss term over the whole stack."""
    cast = jax.tree.map(lambda v: v.astype(jnp.bfloat16), stack)
    return scanned(lambda x, own: region(x, jax.tree.map(lambda v: v.astype(x.dtype), own)))(x, cast), 1e-2 * jnp.sum(
        stack["kernel"] ** 2
    )


def over_time(x: Any, own: Any) -> Any:
    """A recurrence inside the layer."""
    steps = jnp.stack([x, x, x])
    with piper.annotate("PP"):
        return jax.lax.scan(lambda h, t: (jnp.tanh(h + layer(t, own)), None), x, steps)[0]


LOOPS: dict[str, Loop] = {
    "checkpointed": scanned(jax.checkpoint(region)),
    "checkpoint around": jax.checkpoint(scanned(), policy=jax.checkpoint_policies.dots_saveable),
    "balance": with_balance,
    "cast": in_bfloat16,
    "other axis": lambda x, s: scanned()(x, {**s, "kernel": jnp.swapaxes(jnp.swapaxes(s["kernel"], 0, 2), 0, 2)}),
    "recurrent": scanned(over_time),
    "shared": lambda x, s: jax.lax.fori_loop(0, 3, lambda _, x: region(x, jax.tree.map(lambda v: v[0], s)), x),
}


@pytest.mark.parametrize("one", [region, layer], ids=["regions", "cut"])
def test_plans_are_those_of_a_list_of_layers(one: Callable[..., Any]) -> None:
    plans = []
    for loop in (scanned(one), None):
        p = problem(loop, one)
        plans.append(piper.trace(p.loss_fn, p.params, p.batch, optimizer=p.optimizer).cut(stages=3))
    assert str(plans[0]) == str(plans[1])
    assert [replace(op, source="") for op in plans[0].dag.ops.values()] == [
        replace(op, source="") for op in plans[1].dag.ops.values()
    ]
    assert plans[1].dag.buckets == {
        name: replace(bucket, leaves=tuple(replace(leaf, layered=None) for leaf in bucket.leaves))
        for name, bucket in plans[0].dag.buckets.items()
    }
    assert plans[0].dag.data == plans[1].dag.data
    paths = [set(plan.source.optimizer.leaf_paths) for plan in plans]
    assert paths[0] == paths[1]


@pytest.mark.parametrize("name", LOOPS)
def test_each_layer_is_a_unit(name: str) -> None:
    p = problem(LOOPS[name])
    plan = piper.trace(p.loss_fn, p.params, p.batch)
    assert plan.num_stages == (3 if name == "shared" else LAYERS)
    assert max(op.flops_forward for op in plan.dag.ops.values()) < sum(
        op.flops_forward for op in plan.dag.ops.values()
    ) / (2 if name == "shared" else 3)


def test_a_recurrence_over_time_stays_whole() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        steps = jnp.moveaxis(batch["x"].reshape(-1, 2, DIM), 1, 0)
        return jnp.mean(jax.lax.scan(lambda h, t: (jnp.tanh(h + layer(t, params)), None), steps[0], steps)[0] ** 2)

    plan = piper.trace(loss_fn, jax.tree.map(lambda v: v[0], parameters(scanned())["layers"]), batch())
    assert [leaf.path for bucket in plan.dag.buckets.values() for leaf in bucket.leaves] == ["bias", "kernel"]


@pytest.mark.parametrize(
    ("loop", "optimizer", "layout"),
    [
        (scanned(), adamw, {"stages": 4, "data": 2, "zero_stage": 1, "microbatches": 4}),
        (LOOPS["checkpoint around"], decayed_kernels, {"stages": 2, "data": 2, "zero_stage": 3, "microbatches": 2}),
        (with_balance, factored, {"stages": 2, "microbatches": 2}),
        (scanned(layer), adamw, {"stages": 2, "microbatches": 2}),
    ],
    ids=["regions", "checkpoint and mask by ndim", "balance and adafactor", "cut"],
)
def test_results_are_those_of_one_device(loop: Loop, optimizer: Any, layout: dict[str, Any]) -> None:
    assert_equivalent(problem(loop, optimizer=optimizer()), strategy(**layout))


def test_evaluation_may_go_through_the_layers_in_another_way() -> None:
    """A loop, no loop, and one layer alone, after which a step still has all that it needs."""
    found = problem(scanned(layer))
    params = found.params

    def unrolled(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for k in range(LAYERS):
            x = layer(x, jax.tree.map(lambda v, k=k: v[k], params["layers"]))
        return jnp.mean(x**2)

    def rolled(params: Any, batch: Any) -> Any:
        return jnp.mean(scanned(layer)(batch["x"], params["layers"]) ** 2)

    for fn, other in ((rolled, unrolled), (unrolled, rolled)):
        train = piper.parallelize(fn, params, found.batch, optimizer=found.optimizer, strategy=strategy(stages=2))
        state = train.init(params)
        loss = float(fn(params, found.batch))
        np.testing.assert_allclose(float(train.evaluate(state, found.batch, other)["loss"]), loss, rtol=1e-5)
        train.predict(state, found.batch, lambda p, b: layer(b["x"], jax.tree.map(lambda v: v[0], p["layers"])))
        np.testing.assert_allclose(float(train.step(state, found.batch)[1]["loss"]), loss, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "stages", "data", "zero"),
    [*product(LOOPS, (2,), (1, 2), (0, 1, 3)), *product(["checkpointed", "balance", "cast"], (4,), (1, 2), (0, 1, 3))],
)
def test_all_loops(name: str, stages: int, data: int, zero: int) -> None:
    precision = "bfloat16" if name == "cast" else "float32"
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(2e-2, eps=1e-2))
    found = problem(LOOPS[name], optimizer=optimizer, precision=precision)
    if stages <= (3 if name == "shared" else LAYERS) and (data > 1 or zero == 0):
        assert_equivalent(found, strategy(stages=stages, data=data, zero_stage=zero, microbatches=4))


@pytest.mark.full
def test_more_layers_are_no_more_programs() -> None:
    counts = []
    for repeats in (1, 3):
        p = problem(scanned(layer), layer)
        layers = jax.tree.map(lambda v, n=repeats: jnp.concatenate([v[:4]] * n), p.params["layers"])
        p.params = {**p.params, "layers": layers}
        counts.append(p.parallelize(strategy(stages=4, microbatches=4)).compiler.num_compiles)
    assert counts[0] == counts[1]


# -- stacks of stacks, and of several layers -------------------------------------------------------------
def grouped(loop: Callable[[Any, Any], Any]) -> Problem:
    """Two groups of three layers, ``[2, 3, ...]``; ``loop`` takes one group."""
    kernels = 0.4 * jax.random.normal(jax.random.key(2), (2, 3, DIM, DIM))

    def loss_fn(params: Any, batch: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, own: (loop(x @ own["first"], own["layers"]), None), batch["x"], params["groups"])
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

    groups = {"first": jnp.stack([jnp.eye(DIM)] * 2), "layers": {"kernel": kernels, "bias": jnp.zeros((2, 3, DIM))}}
    return Problem(loss_fn=loss_fn, params={"groups": groups, "head": jnp.ones((DIM, 1))}, batch=batch())


def several(x: Any, stack: Any) -> Any:
    """The layers of a group one after another, such as a local and a global one."""
    for k in range(3):
        x = layer(x, jax.tree.map(lambda v, k=k: v[k], stack))
    return x


GROUPS = [
    grouped(scanned(layer)),
    grouped(jax.checkpoint(scanned(layer))),
    grouped(several),
    grouped(lambda x, stack: jax.vmap(layer, (None, 0))(x, stack).mean(0)),
]


@pytest.mark.parametrize("found", GROUPS, ids=["scan in scan", "checkpoint", "several", "vmap in scan"])
def test_groups_of_layers_are_cut_between_groups(found: Problem) -> None:
    plan = piper.trace(found.loss_fn, found.params, found.batch).cut(stages=["groups.0", "groups.1, head"])
    for stage, group in enumerate(("groups.0.", "groups.1.")):
        reads = [b for op in plan.dag.ops.values() if stage == op.PP for b in op.reads]
        paths = {leaf.path for b in reads for leaf in plan.dag.buckets[b].leaves}
        assert paths - {"head"} == {f"{group}{name}" for name in ("first", "layers.bias", "layers.kernel")}


@pytest.mark.full
@pytest.mark.parametrize("found", GROUPS, ids=["scan in scan", "checkpoint", "several", "vmap in scan"])
def test_groups_of_layers_give_the_results_of_one_device(found: Problem) -> None:
    assert_equivalent(found, strategy(stages=2, data=2, zero_stage=1, microbatches=2))


# -- Flax ----------------------------------------------------------------------------------------------
class Block(linen.Module):
    @linen.compact
    def __call__(self, x: Any, _: Any) -> Any:
        with piper.annotate("PP"):
            return x + linen.Dropout(0.2, deterministic=False)(jnp.tanh(linen.Dense(DIM)(x))), None


class Stack(linen.Module):
    axis: int = 0

    @linen.compact
    def __call__(self, x: Any) -> Any:
        rngs = {"params": True, "dropout": True}
        layers = linen.scan(linen.remat(Block), variable_axes={"params": self.axis}, split_rngs=rngs, length=LAYERS)
        return linen.Dense(1)(layers(name="layers")(x, None)[0])


def linen_problem(axis: int) -> Problem:
    model = Stack(axis)
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch()["x"])

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        return jnp.mean((model.apply(params, batch["x"], rngs={"dropout": rng}) - batch["y"]) ** 2)

    return Problem(loss_fn=loss_fn, params=params, batch=batch())


class Partitioned(linen.Module):
    @linen.compact
    def __call__(self, x: Any, _: Any) -> Any:
        init = linen.with_partitioning(linen.initializers.normal(), ("in", "out"))
        return x + x @ self.param("kernel", init, (DIM, DIM)), None


def test_layers_have_the_partitioning_of_their_own_dimensions() -> None:
    model = linen.scan(
        Partitioned, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS,
        metadata_params={linen.PARTITION_NAME: "layers"},
    )()  # fmt: skip
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), batch()["x"], None))
    plan = piper.trace(lambda p, b: jnp.mean(model.apply(p, b["x"], None)[0] ** 2), params, batch())
    assert {leaf.axis_names for b in plan.dag.buckets.values() for leaf in b.leaves} == {("in", "out")}


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.dropout = nnx.Linear(DIM, DIM, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        with piper.annotate("PP"):
            return x + self.dropout(jnp.tanh(self.linear(x)))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        make = nnx.vmap(Layer, in_axes=(0,), out_axes=0)
        self.layers = nnx.split_rngs(splits=LAYERS)(make)(rngs)
        self.head = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(nnx.scan(lambda x, own: own(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers))


def nnx_problem() -> Problem:
    return Problem(
        loss_fn=lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2),
        params=Net(nnx.Rngs(0)), batch=batch(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (lambda: linen_problem(1), {"stages": 2, "data": 2, "microbatches": 2}),
        (nnx_problem, {"stages": 2, "data": 2, "zero_stage": 1, "microbatches": 2}),
    ],
    ids=["linen", "nnx"],
)
def test_flax(make: Callable[[], Problem], layout: dict[str, Any]) -> None:
    found = make()
    assert {op.name for op in piper.trace(found.loss_fn, found.params, found.batch).dag.ops.values()} >= {
        f"layers.{k}" for k in range(LAYERS - 1)
    }
    assert_equivalent(found, strategy(**layout))


# -- a region around and inside other transformations ---------------------------------------------------
@pytest.mark.parametrize(
    "wrapped", [jax.jit(region), jax.checkpoint(region), jax.vmap(region, (0, None))], ids=["jit", "checkpoint", "vmap"]
)
def test_regions_inside(wrapped: Any) -> None:
    p = problem(None, wrapped)
    assert piper.trace(p.loss_fn, p.params, p.batch).num_stages == LAYERS


def test_opened_checkpoints_keep_what_their_policy_keeps() -> None:
    kept = {}
    for policy in ("nothing_saveable", "everything_saveable"):
        again = jax.checkpoint(scanned(), policy=getattr(jax.checkpoint_policies, policy))
        p = problem(again)
        kept[policy] = sum(op.residual_bytes for op in piper.trace(p.loss_fn, p.params, p.batch).dag.ops.values())
    assert kept["nothing_saveable"] < kept["everything_saveable"]
