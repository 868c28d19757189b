"""Optimizers as configurations describe them: under a plan as on one device, and what their state says."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest
from oracle import Problem, assert_equivalent, strategy
from tiny_models import Tower, mean_loss, tokens

from piper_jax.config import OptimizerSection
from piper_jax.errors import RuntimeFault
from piper_jax.optimizers import build_optimizer

SECTIONS = {
    "adamw": OptimizerSection(
        learning_rate=2e-2, eps=1e-2, schedule="wsd", warmup_steps=1, decay_paths=("kernel",), clip_norm=0.5,
        accumulate_steps=2, ema_decay=0.5,
    ),
    "sgd": OptimizerSection(name="sgd", learning_rate=0.1, nesterov=True, schedule="linear", weight_decay=0.01),
    "adafactor": OptimizerSection(name="adafactor", learning_rate=1e-2, eps=1e-6, schedule="constant"),
    "muon": OptimizerSection(name="muon", learning_rate=1e-2, eps=1e-2, clip_norm=None),
    "lion": OptimizerSection(name="lion", learning_rate=1e-6, weight_decay=0.0),
}  # fmt: skip


FULL = {"sgd", "lion", "adafactor"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] if n in FULL else []) for n in SECTIONS])
def test_a_configured_optimizer(name: str) -> None:
    optimizer = build_optimizer(SECTIONS[name], num_steps=10)
    found = Problem(loss_fn=mean_loss, params=Tower(layers=2), batch=tokens(8), optimizer=optimizer)
    assert_equivalent(found, strategy(stages=2, data=2, microbatches=2))


def scaled_loss(model: Tower, batch: dict[str, jax.Array]) -> jax.Array:
    return mean_loss(model, batch) * batch["scale"].mean()


@cache
def averaging() -> Problem:
    section = OptimizerSection(learning_rate=1e-2, eps=1e-2, clip_norm=0.5, ema_decay=0.5, warmup_steps=2)
    batch = {**tokens(8), "scale": np.ones(8, np.float32)}
    return Problem(loss_fn=scaled_loss, params=Tower(layers=2), batch=batch, optimizer=build_optimizer(section, 10))


@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=pytest.mark.full), 1, 3])
def test_what_the_state_says_and_that_it_stays_finite(zero_stage: int) -> None:
    found = averaging()
    train = found.parallelize(strategy(stages=2, data=2, microbatches=2, zero_stage=zero_stage))
    state, _ = train.step(train.init(found.params), found.batch)
    said = train.scalars(state, "grad_norm", "learning_rate")
    state, _ = train.step(state, found.batch)  # uses up the state that was read
    assert float(said["grad_norm"]) == pytest.approx(float(optax.tree.norm(found.reference(2, 2).gradients)), rel=1e-5)
    assert float(said["learning_rate"]) == 0.0
    assert float(train.scalars(state, "learning_rate")["learning_rate"]) == pytest.approx(0.5e-2)

    average, kept = train.with_params_of(state, "average"), train.opt_state(state).inner
    assert_equal(train.params(average), kept.average)
    losses = [float(train.evaluate(s, found.batch)["loss"]) for s in (state, average)]
    assert losses[0] < losses[1]
    for call, wrong, right in ((train.scalars, "grad_nrm", "grad_norm"), (train.with_params_of, "averge", "average")):
        with pytest.raises(RuntimeFault, match=f"did you mean '{right}'"):
            call(state, wrong)

    before = train.params(state)
    infinite = {**found.batch, "scale": np.where(np.arange(8) == 7, np.inf, 1).astype(np.float32)}
    state, _ = train.step(state, infinite)
    assert_equal((before, kept), (train.params(state), train.opt_state(state).inner))
    said = train.scalars(state, "grad_norm", "num_steps")
    assert not np.isfinite(said["grad_norm"])
    assert int(said["num_steps"]) == 2


def assert_equal(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(left), jax.tree.leaves(right))
