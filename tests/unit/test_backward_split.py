"""BI and BW are a partition of the backward program: nothing twice, nothing lost, the same numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from piper_jax.tracing.chunk import chunks
from piper_jax.tracing.costs import total_flops
from piper_jax.tracing.passes import Passes, passes
from piper_jax.tracing.trace import trace

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
