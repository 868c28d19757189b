"""BI and BW are a partition of the backward program: nothing twice, nothing lost, the same numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import piper_jax as piper
from piper_jax.tracing.chunk import Chunk, chunks
from piper_jax.tracing.costs import total_flops
from piper_jax.tracing.loss_program import LossProgram
from piper_jax.tracing.passes import Passes, passes
from piper_jax.tracing.tracer import trace
from piper_jax.tracing.unit_costs import unit_costs

WIDTH, ROWS = 4, 6


@jax.custom_vjp
def doubled_gradient(x):
    return jnp.sin(x)


doubled_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2.0 * g * jnp.cos(x),))


def dense(weight, x):
    return jnp.tanh(x @ weight)


def with_custom_vjp(weight, x):
    return doubled_gradient(x @ weight)


def with_scan(weight, x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ weight), None), x, None, length=3)[0]


LAYERS = {"dense": dense, "custom_vjp": with_custom_vjp, "scan": with_scan}


def built_passes(layer, stage: int, remat: str | None = None) -> Passes:
    """The passes of one of three stages of two layers each."""

    def loss(params, batch):
        x = batch
        for weight in params:
            x = x + layer(weight, x)
        return (x**2).mean()

    params = [jnp.eye(WIDTH) * 0.3 + k * 0.01 for k in range(6)]
    source = trace(loss, params, jnp.ones((ROWS, WIDTH))).source
    eqns = source.program.flat.eqns
    products = [i for i, e in enumerate(eqns) if e.name in ("dot_general", "scan")]
    units = tuple(sum(i >= products[2 * s] for s in (1, 2)) for i in range(len(eqns)))
    return passes(source.program, chunks(source.program, units, [[0], [1], [2]])[stage], remat)


@pytest.mark.parametrize("remat", [None, "nothing_saveable"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("layer", LAYERS)
def test_no_equation_twice_and_none_lost(layer: str, stage: int, remat: str | None) -> None:
    built = built_passes(LAYERS[layer], stage, remat)
    assert built.backward is not None
    assert built.halves is not None
    whole = [e.outputs for e in built.backward.eqns]
    first, second = ([e.outputs for e in half.eqns] for half in (built.halves.for_inputs, built.halves.for_weights))
    assert sorted(first + second) == sorted(whole)
    assert not set(first) & set(second)
    halves = (built.halves.for_inputs, built.halves.for_weights)
    assert sum(total_flops(half.eqns) for half in halves) == total_flops(built.backward.eqns)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("layer", LAYERS)
def test_halves_give_what_the_whole_gives(layer: str, stage: int) -> None:
    built = built_passes(LAYERS[layer], stage)
    assert built.backward is not None
    assert built.halves is not None
    rng = np.random.default_rng(0)
    inputs = [jnp.asarray(rng.normal(size=built.backward.avals[v].shape), "float32") for v in built.backward.inputs]
    whole = built.backward(*inputs)
    num_cotangents = len(built.chunk.diff_externals)
    for_inputs = built.halves.for_inputs(*inputs)
    cotangents, crossing = for_inputs[:num_cotangents], for_inputs[num_cotangents:]
    gradients = built.halves.for_weights(*inputs, *crossing)
    for expected, found in zip(whole, [*cotangents, *gradients], strict=True):
        np.testing.assert_array_equal(expected, found)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weight_gradients_are_left_to_the_second_half(stage: int) -> None:
    """Of the products in the backward of two dense layers, the two for weights are in BW, also on the first stage."""
    built = built_passes(dense, stage)
    assert built.halves is not None
    count = [sum(e.name == "dot_general" for e in h.eqns) for h in (built.halves.for_inputs, built.halves.for_weights)]
    assert count == ([1, 2] if stage == 0 else [2, 2])


def test_recompute_happens_once_under_remat() -> None:
    plain, again = built_passes(dense, 1), built_passes(dense, 1, "nothing_saveable")
    assert again.num_residuals == 0 < plain.num_residuals
    assert again.halves is not None
    tanhs = [sum(e.name == "tanh" for e in h.eqns) for h in (again.halves.for_inputs, again.halves.for_weights)]
    assert tanhs == [2, 0]


# -- what is better left whole -------------------------------------------------------------------------------
@jax.custom_vjp
def product(weight, x):
    return x @ weight


product.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g, g @ kept[0].T))


@jax.custom_vjp
def kernel(weight, x):
    return x @ weight


def kernel_backward(kept, g):
    both = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in kept)
    return jax.pure_callback(lambda w, x, g: (x.T @ g, g @ w.T), both, *kept, g)


kernel.defvjp(lambda w, x: (x @ w, (w, x)), kernel_backward)


def with_cond(weight, x):
    return jax.lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ weight), lambda: x @ weight)


def over_stacked_layers(weight, x):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, jnp.stack([weight, 2 * weight]))[0]


def scan_and_dense(weight, x):
    return dense(weight, with_scan(weight, dense(weight, x)))


def without_parameters(weight, x):
    return jnp.tanh(x) * jax.lax.stop_gradient(weight).sum()


WHOLE = {
    "dense": (dense, ""),
    "plain custom_vjp": (product, ""),
    "checkpoint": (jax.checkpoint(dense), ""),
    "jit": (jax.jit(dense), ""),
    "scan and dense": (scan_and_dense, ""),
    "scan": (with_scan, "`scan`"),
    "stacked layers": (over_stacked_layers, "`scan`"),
    "checkpointed scan": (jax.checkpoint(with_scan), "`scan`"),
    "cond": (with_cond, "`cond`"),
    "kernel": (kernel, "`pure_callback`"),
    "frozen": (without_parameters, "no trainable parameters"),
}


def middle_of_three(layer) -> tuple[LossProgram, Chunk]:
    def loss(params, batch):
        x = batch
        for k, weight in enumerate(params):
            with piper.annotate("PP"):
                x = x + (layer if k == 1 else dense)(weight, x)
        return (x**2).mean()

    source = piper.trace(loss, [jnp.eye(WIDTH)] * 3, jnp.ones((ROWS, WIDTH))).source
    return source.program, chunks(source.program, source.units.of_eqn, [[0], [1], [2]])[1]


@pytest.mark.parametrize("remat", [None, "nothing_saveable"])
@pytest.mark.parametrize("name", list(WHOLE))
def test_what_stays_whole_and_why(name: str, remat: str | None) -> None:
    layer, expected = WHOLE[name]
    costs = unit_costs(*middle_of_three(layer), remat)
    found = costs["whole_because"]
    assert expected in found
    assert bool(expected) == bool(found) == (not costs["splittable"])
    if "`" in expected:
        assert costs["flops_backward_weight"] < 0.1 * costs["flops_backward_input"]
        assert "test_backward_split.py:" in found or name == "kernel"


def test_a_first_stage_that_only_looks_up_leaves_all_to_the_second_half() -> None:
    """Its BI is empty and takes no time, and its BW fills the bubble as any other: no reason to keep it whole."""

    def loss(params, batch):
        with piper.annotate("PP"):
            x = params["table"][batch]
        with piper.annotate("PP"):
            return (dense(params["weight"], x) ** 2).mean()

    params = {"table": jnp.ones((5, WIDTH)), "weight": jnp.eye(WIDTH)}
    first, second = piper.trace(loss, params, jnp.zeros((ROWS,), jnp.int32)).dag.ops.values()
    assert (first.splittable, first.flops_backward_input) == (True, 0)
    assert first.flops_backward_weight > 0
    assert (second.splittable, second.whole_because) == (True, "")


def test_stages_are_judged_as_they_are_cut() -> None:
    """A unit that would stay whole alone is split together with others, and remat changes nothing about it."""

    def loss(params, batch):
        x = batch
        for k, weight in enumerate(params):
            with piper.annotate("PP"):
                x = x + (with_scan if k == 1 else dense)(weight, x)
        return (x**2).mean()

    plan = piper.trace(loss, [jnp.eye(WIDTH)] * 6, jnp.ones((ROWS, WIDTH)))
    assert [op.splittable for op in plan.dag.ops.values()] == [True, False, True, True, True, True]
    assert all(op.splittable for op in plan.cut(stages=[(0, 1, 2), (3, 4, 5)]).dag.ops.values())
    checkpointed = plan.remat(piper.where())
    for before, after in zip(plan.dag.ops.values(), checkpointed.dag.ops.values(), strict=True):
        assert (before.splittable, before.whole_because) == (after.splittable, after.whole_because)
        assert before.flops_backward_input < after.flops_backward_input
