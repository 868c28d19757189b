"""ZeRO-1, 2 and 3 take the steps of one device: what the support matrix has no factor for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import SEED, Problem, assert_close, momentum, trainable_part
from tiny_models import VOCAB, mean_loss, tokens, weighted_loss
from tolerances import TOLERANCES
from zero_problems import (
    COLLECTIVES,
    ROWS,
    WIDTH,
    Layers,
    assert_copies_are_equal,
    assert_steps_and_copies,
    problem,
    strategy,
)

import piper_jax as piper
from piper_jax import where
from piper_jax.runtime.reference import reference_gradients, with_trainable


# -- what the matrix has no factor for --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "zero", "options"),
    [
        pytest.param("adamw", 1, {"stages": 4}, marks=pytest.mark.full),
        pytest.param("adafactor", 3, {"stages": 4}, marks=pytest.mark.sample),
        pytest.param("adamw", 2, {"data": 3, "reduce_every": 3, "bucket_bytes": 300}, marks=pytest.mark.full),
        pytest.param("adafactor", 1, {"schedule": "DualPipe"}, marks=pytest.mark.full),
        pytest.param("muon", 2, {"schedule": "ZBV", "reduce_every": 2}, marks=pytest.mark.full),
    ],
)
def test_state_without_a_gradient(name: str, zero: int, options: dict[str, Any]) -> None:
    found = problem("stopped", name)
    assert_steps_and_copies(found, found.parallelize(strategy(zero, **options)))


@pytest.mark.parametrize(
    ("stages", "data", "microbatches"),
    [pytest.param(1, 8, 2, marks=pytest.mark.full), pytest.param(4, 2, 8, marks=pytest.mark.full), (1, 1, 2)],
)
@pytest.mark.parametrize("zero", [1, 3])
def test_eight_devices_and_one(zero: int, stages: int, data: int, microbatches: int) -> None:
    found = problem("tied", "adamw")
    layout = {"stages": stages, "data": data, "microbatches": microbatches}
    assert_steps_and_copies(found, found.parallelize(strategy(zero, **layout)))


class Mixed(nnx.Module):
    """bf16 and float32 leaves in one bucket, of lengths that no number of devices divides."""

    def __init__(self) -> None:
        random = jax.random.key(0)
        self.embed = nnx.Param(jax.random.normal(random, (VOCAB, WIDTH), jnp.bfloat16))
        self.bias = nnx.Param(jnp.linspace(0.1, 0.9, WIDTH, dtype=jnp.float32))
        self.gain = nnx.Param(jnp.asarray(1.5, jnp.bfloat16))
        self.head = nnx.Param(jax.random.normal(random, (WIDTH, VOCAB), jnp.float32))

    def __call__(self, x: Any) -> Any:
        with piper.annotate("PP"):
            x = jnp.tanh(self.embed[...][x].astype(jnp.float32) * self.gain[...].astype(jnp.float32) + self.bias[...])
        with piper.annotate("PP"):
            return x @ self.head[...]


@pytest.mark.sample
@pytest.mark.parametrize(("zero", "stages"), [(1, 1), (3, 2)])
def test_bfloat16_beside_float32_in_one_bucket(zero: int, stages: int) -> None:
    """A parameter in bf16 is rounded after every step, so its neighbours are compared to that rounding too."""
    found = Problem(
        loss_fn=mean_loss, params=Mixed(), batch=tokens(24), optimizer=momentum(), precision="bfloat16", steps=2
    )
    train = found.parallelize(strategy(zero, stages=stages, data=3, microbatches=2, bucket_bytes=1000))
    state = train.init(found.params)
    assert {a.dtype for a in jax.tree.leaves(train.params(state))} == {jnp.dtype("bfloat16"), jnp.dtype("float32")}
    gradients = train.gradients(state, found.batch)
    expected = found.reference(2, 3)
    assert_close(gradients, expected.gradients, found.tolerance, "gradient")
    for step in range(found.steps):
        state, metrics = train.step(state, found.batch_of(step))
        assert_copies_are_equal(train, state)
        assert float(metrics["loss"]) == pytest.approx(expected.losses[step], rel=2e-2)
    assert_close(trainable_part(train.params(state)), expected.trained, found.tolerance, "parameter")


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.full), 3])
def test_parameters_that_are_not_trained(zero: int) -> None:
    """Adapters: the kernels are frozen by ``wrt``, and shards and reductions are of the rest alone."""

    class Adapter(nnx.Param):
        pass

    model = Layers(odd=True)
    for layer in model.layers:
        layer.bias = Adapter(layer.bias[...])
    found = Problem(loss_fn=mean_loss, params=model, batch=tokens(ROWS), wrt=Adapter, steps=2)
    train = found.parallelize(strategy(zero, data=3))
    assert_steps_and_copies(found, train)
    assert len(jax.tree.leaves(train.gradients(train.init(model), found.batch))) == len(model.layers)


def test_each_layer_in_its_own_way() -> None:
    """Stages of ZeRO, spans and distances side by side on one group; the last layer is plainly replicated."""
    found = problem("even", "adafactor")
    plan = piper.trace(found.loss_fn, found.params, found.batch, optimizer=found.optimizer)
    ways: list[dict[str, Any]] = [
        {"shard_optimizer": True, "bucket_bytes": 300},
        {"shard_grads": True, "reduce_every": "microbatch", "reduce_stream": "reduce"},
        {"shard_params": True, "reduce_every": 2, "gather_distance": 0},
        {"shard_params": True, "gather_stream": "gather", "gather_distance": 3},
        {},
    ]
    for unit in range(8):
        plan = plan.replicate(where(PP=unit), **ways[min(unit, len(ways) - 1)])
    plan = plan.cut(stages=2).split(where(), num_microbatches=3)
    for stage in (0, 1):
        plan = plan.place(where(PP=stage), group=(2 * stage, 2 * stage + 1))
    assert_steps_and_copies(found, piper.compile(plan))


@pytest.mark.full
@pytest.mark.parametrize(("name", "zero"), [("adamw", 1), ("adafactor", 3)])
def test_replicas_along_data_and_expert(name: str, zero: int) -> None:
    found = problem("tied", name)
    chosen = piper.Strategy(
        data_parallel=2, expert_parallel=2, pipeline_parallel=2, num_microbatches=3, zero_stage=zero
    )
    assert_steps_and_copies(found, found.parallelize(chosen))


def expected_gradients(found: Problem, trained: Any, batch: Any, step: int, slices: tuple[int, int]) -> Any:
    params = with_trainable(found.params, trained, found.wrt)
    return reference_gradients(
        found.loss_fn, params, batch, num_microbatches=slices[0], num_replicas=slices[1], key=jax.random.key(SEED),
        step=step,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "zero", "options"),
    [
        pytest.param("adafactor", 3, {"reduce_every": 3, **COLLECTIVES["overlapped"]}, marks=pytest.mark.full),
        ("adamw", 1, {}),
        pytest.param("adamw", 3, {"schedule": "DualPipe"}, marks=pytest.mark.full),
        pytest.param("lamb", 2, {"schedule": "ZBV", "reduce_every": 3}, marks=pytest.mark.full),
    ],
)
def test_everything_else_that_a_train_does(name: str, zero: int, options: dict[str, Any]) -> None:
    """A masked loss; batches of two sizes; gradients, evaluation and prediction before and after steps."""
    found = problem("tied", name, weighted_loss)
    train = found.parallelize(strategy(zero, **options))
    state = train.init(found.params, seed=SEED)
    large = jax.tree.map(lambda v: np.concatenate([v, v[::-1]]), found.batch)
    for step, batch in enumerate((found.batch, large, found.batch)):
        trained = trainable_part(train.params(state))
        loss, gradients = expected_gradients(found, trained, batch, step, (4, 2))
        assert_close(train.gradients(state, batch), gradients, found.tolerance, "gradient")
        assert float(train.evaluate(state, batch)["loss"]) == pytest.approx(float(loss), rel=2e-5)
        state, metrics = train.step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=2e-5)
        assert_copies_are_equal(train, state)

    model = train.params(state)
    logits = train.predict(state, found.batch, lambda model, batch: model(batch["x"]))
    assert_close(logits, model(found.batch["x"]), found.tolerance, "prediction")
    mean = train.evaluate(state, found.batch, loss_fn=mean_loss)["loss"]
    assert float(mean) == pytest.approx(float(mean_loss(model, found.batch)), rel=2e-5)
    assert train.bisect(state, found.batch) is None
    assert train.run_node("F[PP=0,MB=3]", state, found.batch).difference < 2e-5
    assert train.profile(state, found.batch).groups

    again = train.init(model, seed=SEED)
    assert_close(trainable_part(train.params(again)), trainable_part(model), TOLERANCES["float64"], "parameter")
    fresh = jax.jit(found.optimizer.init)(trainable_part(model))
    assert_close(train.opt_state(again), fresh, TOLERANCES["float64"], "optimizer")
    assert_copies_are_equal(train, again)


# -- the same by other words ---------------------------------------------------------------------------
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_stage_of_zero_is_short_for_its_directive(zero: int) -> None:
    @piper.annotate(data_parallel=2, pipeline_parallel=2, zero_stage=zero)
    class Annotated(Layers):
        pass

    def plan(model: nnx.Module, chosen: piper.Strategy) -> piper.Plan:
        return piper.trace(mean_loss, model, tokens(ROWS), optimizer=momentum()).apply(chosen)

    degrees = {"data_parallel": 2, "pipeline_parallel": 2}
    named = plan(Layers(), piper.Strategy(**degrees, directives=(piper.directive(f"ZeRO-{zero}"),)))
    short = plan(Layers(), piper.Strategy(**degrees, zero_stage=zero))
    annotated = plan(Annotated(), piper.Strategy.of(Annotated))
    assert named.dag == short.dag == annotated.dag
    assert str(named) == str(short) == str(annotated)
    assert named.complete() == annotated.complete()
