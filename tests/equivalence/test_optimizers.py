"""Unmodified optax: what acts on each parameter alone, and what mixes parameters of different stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest
from oracle import Problem, assert_equivalent, strategy
from tiny_models import Tower, mean_loss, tokens

import piper_jax as piper


def scheduled() -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 3e-2, 2, 8)
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, eps=1e-2))


def accumulated() -> optax.GradientTransformation:
    """Three steps: the parameters move after the second."""
    return optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.2, momentum=0.9)), 2)


def decayed_kernels() -> optax.GradientTransformation:
    """Weight decay on matrices alone."""
    return optax.chain(
        optax.scale_by_adam(eps=1e-2),
        optax.masked(optax.add_decayed_weights(0.1), lambda tree: jax.tree.map(lambda v: v.ndim > 1, tree)),
        optax.scale_by_learning_rate(2e-2),
    )


def finite_only() -> optax.GradientTransformation:
    return optax.apply_if_finite(optax.adam(2e-2, eps=1e-2), max_consecutive_errors=3)


def factored() -> optax.GradientTransformation:
    """Adafactor: row and column statistics of each matrix, clipping by each parameter's own norm."""
    return optax.adafactor(1e-2, min_dim_size_to_factor=4, multiply_by_parameter_scale=False)


def smooth_signs() -> optax.GradientTransformation:
    """Lion turns signs of tiny numbers into whole steps, so its momentum is compared and its steps are small."""
    return optax.lion(1e-6, weight_decay=0.0)


OPTIMIZERS = [scheduled, accumulated, decayed_kernels, finite_only, factored, smooth_signs]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda f: f.__name__)
def test_optimizer(optimizer: Callable[[], optax.GradientTransformation]) -> None:
    problem = Problem(loss_fn=mean_loss, params=Tower(layers=2, tied=True), batch=tokens(8), optimizer=optimizer())
    assert_equivalent(problem, strategy(stages=2, data=2, microbatches=2))


@cache
def spoiled() -> Problem:
    batch = tokens(8)
    batch["scale"] = jnp.ones(8).at[-1].set(jnp.nan)

    def loss(model: Tower, batch: dict[str, jax.Array]) -> jax.Array:
        return mean_loss(model, batch) * batch["scale"].mean()

    return Problem(loss_fn=loss, params=Tower(layers=2), batch=batch, optimizer=finite_only())


def test_a_step_that_is_not_finite_is_skipped_on_every_stage() -> None:
    problem = spoiled()
    train = problem.parallelize(strategy(stages=2, microbatches=2))
    state = train.init(problem.params)
    before = train.params(state)
    state, _ = train.step(state, problem.batch)
    after = train.params(state)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    assert int(train.opt_state(state).notfinite_count) == 1


def test_an_optimizer_that_mixes_whole_arrays_is_refused() -> None:
    def update(grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None):
        del params
        leaves, tree = jax.tree.flatten(grads)
        wide = [g for g in leaves if g.shape == (512, 1024)]
        total = sum(wide)
        return jax.tree.unflatten(tree, [total if g.shape == (512, 1024) else g for g in leaves]), state

    mixing = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with pytest.raises(piper.TraceError, match="mixes arrays of several parameters") as caught:
        piper.trace(mean_loss, Tower(layers=2, dim=512), tokens(8), optimizer=mixing)
    assert len(str(caught.value).splitlines()) <= 12
