"""What a compiled plan does beyond a first step: other batch sizes, no compilation, evaluation, its own copies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import SEED, Problem, assert_steps, momentum, strategy, trainable_part
from tiny_models import Tower, cross_entropy, mean_loss, tokens
from tolerances import TOLERANCES, assert_close

import piper_jax as piper
from piper_jax.errors import RuntimeFault
from piper_jax.lowering.keys import Key

LAYOUT = {"stages": 3, "data": 2, "microbatches": 2}
FLOAT32 = TOLERANCES["float32"]
_compilations: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _duration, **_: _compilations.append(event) if event.startswith("/jax/core/compile") else None
)


@contextmanager
def nothing_compiles(train: piper.Train) -> Iterator[None]:
    """Neither the plan's own compiler nor JAX traces, lowers or compiles anything within the block."""
    own, seen = train.compiler.num_compiles, len(_compilations)
    yield
    assert train.compiler.num_compiles == own
    assert _compilations[seen:] == []


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(loss_fn=mean_loss, params=Tower(layers=3), batch=tokens())


@pytest.fixture(scope="module")
def train(problem: Problem) -> piper.Train:
    return problem.parallelize(strategy(**LAYOUT))


# -- devices -------------------------------------------------------------------------------------------------
def test_a_map_says_which_device_is_which(problem: Problem, train: piper.Train) -> None:
    """The stages of the plan run on other devices than their numbers, with the same loss."""
    assert train.devices == tuple(jax.devices())
    turned = jax.devices()[4:] + jax.devices()[:4]
    given = piper.DeviceMap.given(train.plan, jax.devices())
    layout = replace(given.layout, physical=(4, 5, 6, 7, 0, 1, 2, 3))
    other = piper.compile(train.plan, devices=replace(given, layout=layout))
    assert other.devices == tuple(turned)
    state = other.init(problem.params)
    used = {device for leaf in jax.tree.leaves(state) for device in leaf.devices()}
    assert used == set(turned[:6])
    losses = [t.step(t.init(problem.params), problem.batch)[1]["loss"] for t in (train, other)]
    assert_close(losses[1], losses[0], FLOAT32, "loss")


# -- compilation -------------------------------------------------------------------------------------------
def test_a_second_step_compiles_nothing(problem: Problem, train: piper.Train) -> None:
    state, metrics = train.step(train.init(problem.params), problem.batch)
    float(metrics["loss"])
    on_device = [jax.tree.map(jnp.asarray, problem.batch_of(k)) for k in (2, 3)]
    with nothing_compiles(train):
        state, metrics = train.step(state, problem.batch_of(1))
    state, metrics = train.step(state, on_device[0])
    with nothing_compiles(train):
        state, metrics = train.step(state, on_device[1])
    before = train.compiler.num_compiles
    train.evaluate(state, problem.batch)
    train.gradients(state, problem.batch)
    with nothing_compiles(train):
        train.evaluate(state, problem.batch)
        train.gradients(state, problem.batch)
        train.step(state, problem.batch)
    assert train.compiler.num_compiles > before


def test_compiling_happens_before_the_first_step(problem: Problem) -> None:
    train = problem.parallelize(strategy(**LAYOUT))
    programs = train.compiler.num_compiles
    train.step(train.init(problem.params), problem.batch)
    assert train.compiler.num_compiles == programs


def test_equal_layers_share_their_programs(problem: Problem) -> None:
    """Eight equal layers on four stages: first, inner and last stage differ, and the inner ones are one program."""
    deep = Problem(loss_fn=mean_loss, params=Tower(layers=8), batch=tokens(32), optimizer=momentum())
    train = deep.parallelize(strategy(stages=4, data=2, microbatches=8))
    assert train.compiler.num_compiles <= 8


CACHED = """
import sys, jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
from test_running import LAYOUT, Problem, Tower, assert_steps, mean_loss, strategy, tokens
problem = Problem(loss_fn=mean_loss, params=Tower(layers=3), batch=tokens())
assert_steps(problem, problem.parallelize(strategy(**LAYOUT)), problem.reference(2, 2))
"""


@pytest.mark.full
def test_programs_from_the_persistent_cache(tmp_path: Path) -> None:
    """What JAX's disk cache gives to a second process cannot be moved to other devices; the plan runs all the same."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    for _ in range(2):
        command = [sys.executable, "-c", CACHED, str(tmp_path)]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert any(tmp_path.iterdir())


# -- another batch size ----------------------------------------------------------------------------------------
def test_a_second_batch_size_compiles_once_and_continues(problem: Problem, train: piper.Train) -> None:
    state, _ = train.step(train.init(problem.params, seed=SEED), problem.batch)
    larger = Problem(loss_fn=mean_loss, params=train.params(state), batch=tokens(32, seed=1), optimizer=momentum())
    with_momentum = larger.parallelize(strategy(**LAYOUT))
    expected = larger.reference(2, 2)
    assert_close(train.gradients(state, larger.batch), expected.gradients, FLOAT32, "gradient")
    state, metrics = train.step(state, larger.batch)
    assert float(metrics["loss"]) == pytest.approx(expected.losses[0], rel=2e-5)
    with nothing_compiles(train):
        state, _ = train.step(state, tokens(32, seed=2))
        train.step(state, problem.batch)
    smaller = Problem(loss_fn=mean_loss, params=larger.params, batch=tokens(8), optimizer=larger.optimizer, steps=2)
    assert_steps(smaller, with_momentum, smaller.reference(2, 2))


def test_a_batch_that_does_not_divide_is_refused_and_nothing_is_lost(problem: Problem, train: piper.Train) -> None:
    state = train.init(problem.params)
    with pytest.raises(piper.PiperError, match="22 rows cannot be divided into 2 microbatches x 2 replicas"):
        train.step(state, tokens(22))
    train.step(state, problem.batch)


# -- evaluation ----------------------------------------------------------------------------------------------
def test_evaluate_and_predict_are_the_models_own(problem: Problem, train: piper.Train) -> None:
    model, batch = problem.params, problem.batch
    state = train.init(model)
    assert float(train.evaluate(state, batch)["loss"]) == pytest.approx(float(mean_loss(model, batch)), rel=2e-5)

    def zero_one(m: Any, b: Any) -> Any:
        wrong = m(b["x"]).argmax(-1) != b["y"]
        return wrong.astype(jnp.float32).mean(), {"wrong": wrong.sum()}

    found, (error, counts) = train.evaluate(state, batch, loss_fn=zero_one), zero_one(model, batch)
    assert float(found["loss"]) == pytest.approx(float(error), rel=2e-5)
    assert int(found["wrong"]) == int(counts["wrong"])

    def outputs(m: Any, b: Any) -> Any:
        logits = m(b["x"])
        return {"logits": logits, "labels": logits.argmax(-1)}

    predicted, expected = train.predict(state, batch, outputs), outputs(model, batch)
    np.testing.assert_array_equal(predicted["labels"], expected["labels"])
    assert_close(predicted["logits"], expected["logits"], FLOAT32, "logits")
    with nothing_compiles(train):
        train.evaluate(state, batch, loss_fn=zero_one)
        train.predict(state, batch, outputs)


def test_evaluation_follows_training(problem: Problem, train: piper.Train) -> None:
    state, _ = train.step(train.init(problem.params), problem.batch)
    trained = train.params(state)

    def summed(m: Any, b: Any) -> Any:
        return cross_entropy(m(b["x"]), b["y"]).sum((1,)).mean()

    expected = float(summed(trained, problem.batch))
    assert float(train.evaluate(state, problem.batch, loss_fn=summed)["loss"]) == pytest.approx(expected, rel=2e-5)
    train.step(state, problem.batch)


# -- ownership -------------------------------------------------------------------------------------------------
def test_the_users_arrays_survive(problem: Problem, train: piper.Train) -> None:
    batch = jax.tree.map(jnp.asarray, problem.batch)
    before = jax.tree.map(np.array, trainable_part(problem.params))
    state = train.init(problem.params)
    for _ in range(2):
        state, metrics = train.step(state, batch)
    assert not any(v.is_deleted() for v in jax.tree.leaves((trainable_part(problem.params), batch, metrics)))
    assert_close(trainable_part(problem.params), before, FLOAT32, "parameter")
    back = train.params(state)
    train.step(state, batch)
    assert all(np.isfinite(v).all() for v in jax.tree.leaves(trainable_part(back)))


def test_evaluation_and_gradients_leave_the_state_usable(problem: Problem, train: piper.Train) -> None:
    state = train.init(problem.params)
    first = train.gradients(state, problem.batch)
    train.evaluate(state, problem.batch)
    assert_close(train.gradients(state, problem.batch), first, FLOAT32, "gradient")
    train.step(state, problem.batch)


def test_a_state_consumed_twice(problem: Problem, train: piper.Train) -> None:
    state = train.init(problem.params)
    train.step(state, problem.batch)
    with pytest.raises(RuntimeFault) as error:
        train.step(state, problem.batch)
    assert str(error.value) == (
        "step: this state was consumed by an earlier step (its buffers were re-used).\n"
        "help: keep the new state: state, metrics = train.step(state, batch)"
    )


def test_results_are_plain_arrays(problem: Problem, train: piper.Train) -> None:
    state, metrics = train.step(train.init(problem.params), problem.batch)
    assert float(metrics["loss"]) > 0
    assert isinstance(metrics["loss"], jax.Array)
    leaves = jax.tree.leaves((trainable_part(train.params(state)), train.opt_state(state)))
    assert all(isinstance(v, jax.Array) and len(v.devices()) == 1 for v in leaves)
    assert all(isinstance(v, jax.Array) for v in jax.tree.leaves(state))


def test_the_same_numbers_every_time(problem: Problem, train: piper.Train) -> None:
    losses = []
    for _ in range(2):
        state = train.init(problem.params, seed=3)
        state, _ = train.step(state, problem.batch)
        losses.append(float(train.step(state, problem.batch)[1]["loss"]))
    assert losses[0] == losses[1]


# -- threads ---------------------------------------------------------------------------------------------------
def test_programs_of_a_group_run_one_after_another(train: piper.Train) -> None:
    """On CPU, where several devices wait for each other in collectives, and each that waits holds a thread."""
    programs = [i for i in train.instructions() if i.program is not None]
    assert {i.role for i in programs} >= {"compute", "update", "exchange"}
    for instruction in programs:
        chained = {Key("token", k.group) for k in (*instruction.reads, *instruction.writes)}
        assert chained <= {*instruction.reads} & {*instruction.writes}


def test_one_device_to_a_group_needs_no_order(problem: Problem) -> None:
    train = problem.parallelize(strategy(stages=3, microbatches=2))
    assert not any(k.kind == "token" for i in train.instructions() for k in i.reads)


@pytest.mark.full
def test_more_programs_than_a_device_takes_at_once() -> None:
    """Steps in flight with collectives inside and across groups: no device may wait for room and hold a thread."""
    wide = Problem(loss_fn=mean_loss, params=Tower(layers=8, dim=512), batch=tokens(256))
    train = wide.parallelize(piper.Strategy(pipeline_parallel=4, data_parallel=2, zero_stage=2, num_microbatches=16))
    state = train.init(wide.params)
    for _ in range(8):
        state, metrics = train.step(state, wide.batch)
    assert np.isfinite(metrics["loss"])
