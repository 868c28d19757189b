"""Stages that are alike are traced and lowered once; what differs in anything that counts is not alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from carrying_model import Net, regression, rows
from flax import nnx
from oracle import Problem, assert_equivalent, momentum, strategy
from tiny_models import Tower, mean_loss, tokens, weighted_loss

import piper_jax as piper
from piper_jax.lowering.executable import lower
from piper_jax.lowering.preparing import lowering_context
from piper_jax.lowering.programs import Compiler

WIDTH = 5
ONES = np.linspace(0.5, 1.5, WIDTH)
Layer = Callable[[Any, Any], Any]


class Model(nnx.Module):
    """One layer for each function of ``(x, weight)``, each a region."""

    def __init__(self, *layers: Layer):
        keys = jax.random.split(jax.random.key(0), len(layers))
        self.weights = nnx.List([nnx.Param(0.4 * jax.random.normal(key, (WIDTH, WIDTH))) for key in keys])
        self.layers = layers

    def __call__(self, x: Any) -> Any:
        for layer, weight in zip(self.layers, self.weights, strict=True):
            with piper.annotate("PP"):
                x = layer(x, weight[...])
        return x


def _loss(model: Model, batch: Any) -> Any:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def _problem(*layers: Layer) -> Problem:
    x = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
    return Problem(loss_fn=_loss, params=Model(*layers), batch={"x": x, "y": np.sin(x)}, optimizer=momentum(), steps=2)


@jax.custom_vjp
def _turned(x: Any) -> Any:
    return jnp.tanh(x)


_turned.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (2 * g,))


def plain(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


# Each differs from ``plain``, or from its neighbour, in one thing alone.
LAYERS: dict[str, tuple[Layer, Layer]] = {
    "a literal": (lambda x, w: jnp.tanh(x @ w) * 2.0, lambda x, w: jnp.tanh(x @ w) * 3.0),
    "the sign of zero": (lambda x, w: jnp.arctan2(plain(x, w), 0.0), lambda x, w: jnp.arctan2(plain(x, w), -0.0)),
    "a constant": (lambda x, w: plain(x, w) + ONES, lambda x, w: plain(x, w) - ONES[::-1]),
    "a large constant": (
        lambda x, w: plain(x, w) + np.zeros((2000, WIDTH), np.float32)[0],
        lambda x, w: plain(x, w) + np.ones((2000, WIDTH), np.float32)[0],
    ),
    "a parameter of an equation": (lambda x, w: plain(x, w).cumsum(1), lambda x, w: plain(x, w)[:, ::-1].cumsum(1)),
    "which operand": (lambda x, w: plain(x, w) - x, lambda x, w: x - plain(x, w)),
    "the body of a loop": (
        lambda x, w: jax.lax.fori_loop(0, 2, lambda _, h: jnp.sin(h @ w), x),
        lambda x, w: jax.lax.fori_loop(0, 2, lambda _, h: jnp.cos(h @ w), x),
    ),
    "a literal in the body of a loop": (
        lambda x, w: jax.lax.scan(lambda h, _: (jnp.sin(2 * h @ w), None), x, None, length=2)[0],
        lambda x, w: jax.lax.scan(lambda h, _: (jnp.sin(3 * h @ w), None), x, None, length=2)[0],
    ),
    "a derivative of its own": (lambda x, w: jnp.tanh(x @ w), lambda x, w: _turned(x @ w)),
    "where gradients stop": (plain, lambda x, w: plain(x, jax.lax.stop_gradient(w)) + 0 * w.sum()),
    "the precision of a product": (plain, lambda x, w: jnp.tanh(jnp.matmul(x, w, precision="highest"))),
    "what is kept for the backward": (jax.checkpoint(plain), plain),
}


@pytest.mark.parametrize("name", LAYERS)
def test_what_counts_tells_layers_apart(name: str) -> None:
    first, second = LAYERS[name]
    plan = _problem(plain, first, first, second, plain).traced
    built = _built(plan, stages=5)
    assert built[1] is built[2]
    assert built[2] is not built[3]


@pytest.mark.sample
def test_layers_that_look_alike_compute_their_own() -> None:
    """All pairs in one model, against the plain step."""
    flat = [layer for pair in list(LAYERS.values())[:8] for layer in pair]
    assert_equivalent(_problem(*flat), strategy(stages=8, microbatches=2))


def _built(plan: piper.Plan, stages: int) -> list[Any]:
    """The forward program of each stage."""
    complete = plan.apply(strategy(stages=stages, microbatches=2)).complete()
    context = lowering_context(complete, plan.source, jax.devices(), 8, training=True)
    return [context.passes(op).forward for op in complete.ops]


class Twice(Compiler):
    """Lowers what it takes for the same once more, and compares the texts."""

    def __init__(self) -> None:
        super().__init__(runs=False)
        self.texts: dict[str, str] = {}
        self.shared = 0

    def _submit(self, digest: str, devices: Any, lower: Callable[[], Any]) -> Callable[[], Any]:
        text = lower().as_text()
        self.shared += digest in self.texts
        assert self.texts.setdefault(digest, text) == text
        return lambda: None


CASES: dict[str, tuple[Callable[[], tuple[Any, Any, Any]], piper.Strategy]] = {
    "1F1B": (lambda: (mean_loss, Tower(layers=8), tokens()), strategy(stages=4, microbatches=4)),
    "split backwards, dropout": (
        lambda: (mean_loss, Tower(layers=8, dropout=0.1), tokens()),
        strategy(stages=4, microbatches=4, schedule="ZBH1"),
    ),
    "ZeRO-2, masked, tied": (
        lambda: (weighted_loss, Tower(layers=8, tied=True), tokens()),
        strategy(stages=4, data=2, microbatches=3, zero_stage=2),
    ),
    "two ways, ZeRO-3": (
        lambda: (mean_loss, Tower(layers=8), tokens(32)),
        strategy(stages=4, data=2, microbatches=8, schedule="DualPipeV", zero_stage=3),
    ),
    "carried state": (lambda: (regression, Net(), rows()), strategy(stages=4, microbatches=4)),
}


@pytest.mark.parametrize("case", CASES)
def test_programs_taken_for_the_same_have_the_same_text(case: str) -> None:
    made, chosen = CASES[case]
    loss_fn, model, batch = made()
    plan = piper.trace(loss_fn, model, batch, optimizer=momentum()).apply(chosen)
    context = lowering_context(plan.complete(), plan.source, jax.devices(), plan.source.batch.size, training=True)
    compiler = Twice()
    lower(context, compiler).instructions()
    assert compiler.shared >= 2
