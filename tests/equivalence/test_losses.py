"""Losses: dropout, auxiliary terms, padding, statistics of a whole microbatch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import SEED, Problem, assert_equivalent, momentum, strategy, trainable_part
from tiny_models import DIM, Tower, cross_entropy, mean_loss, tokens, weighted_loss
from tolerances import TOLERANCES, assert_close

import piper_jax as piper

LAYOUTS = [
    {"stages": 1, "data": 2, "microbatches": 4, "schedule": "GPipe"},
    {"stages": 2, "data": 2, "microbatches": 4, "schedule": "1F1B"},
    {"stages": 4, "data": 2, "microbatches": 4, "schedule": "GPipe"},
]
FEWER = [pytest.param(layout, marks=pytest.mark.full) if k < 2 else layout for k, layout in enumerate(LAYOUTS)]


# -- dropout --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def streams() -> Problem:
    return Problem(loss_fn=mean_loss, params=Tower(dropout=0.3), batch=tokens())


def _masked_by_key(model: Any, batch: Any, rng: Any) -> Any:
    x = model.embed(batch["x"])
    for index, layer in enumerate(model.layers):
        with piper.annotate("PP"):
            keep = jax.random.bernoulli(jax.random.fold_in(rng, index), 0.7, x.shape) if index % 2 else True
            x = jnp.where(keep, layer(x), x)
    return cross_entropy(model.head(x), batch["y"]).mean()


@pytest.fixture(scope="module")
def keyed() -> Problem:
    return Problem(loss_fn=_masked_by_key, params=Tower(), batch=tokens())


@pytest.mark.parametrize("layout", [*LAYOUTS[:1], *FEWER[1:]], ids=str)
def test_dropout_of_nnx_streams(streams: Problem, layout: dict[str, Any]) -> None:
    """The reference knows slices only, so equality in every layout means independence of stages and schedule."""
    assert_equivalent(streams, strategy(**layout))


@pytest.mark.parametrize("layout", FEWER[::2], ids=str)
def test_dropout_from_the_key_of_the_slice(keyed: Problem, layout: dict[str, Any]) -> None:
    assert_equivalent(keyed, strategy(**layout))


def test_masks_differ_between_steps_and_seeds_and_repeat_for_the_same(streams: Problem) -> None:
    train = streams.parallelize(strategy(stages=2, microbatches=2))

    def losses(seed: int) -> list[float]:
        state = train.init(streams.params, seed=seed)
        frozen = train.evaluate(state, streams.batch)["loss"]
        _, first = train.step(state, streams.batch)
        return [float(frozen), float(first["loss"])]

    assert losses(SEED) == losses(SEED)
    assert losses(SEED) != losses(SEED + 1)


# -- auxiliary losses -------------------------------------------------------------------------------------
def _balanced(model: Any, batch: Any) -> Any:
    """An auxiliary loss in every layer, added up on the way and scaled at the end."""
    x, auxiliary = model.embed(batch["x"]), 0.0
    for layer in model.layers:
        with piper.annotate("PP"):
            x = layer(x)
            auxiliary += jnp.mean(x**2) + 0.1 * jnp.abs(x).max()
    task = cross_entropy(model.head(x), batch["y"]).mean()
    return task + 0.02 * auxiliary, {"task": task, "auxiliary": auxiliary}


@pytest.fixture(scope="module")
def balanced() -> Problem:
    return Problem(loss_fn=_balanced, params=Tower(), batch=tokens())


@pytest.mark.parametrize("layout", FEWER, ids=str)
def test_an_auxiliary_loss_in_every_layer(balanced: Problem, layout: dict[str, Any]) -> None:
    train = assert_equivalent(balanced, strategy(**layout))
    metrics = train.evaluate(train.init(balanced.params), balanced.batch)
    np.testing.assert_allclose(metrics["task"] + 0.02 * metrics["auxiliary"], metrics["loss"], rtol=1e-5)


def test_auxiliary_terms_do_not_travel_to_the_last_stage(balanced: Problem) -> None:
    plan = piper.trace(_balanced_without_metrics, balanced.params, balanced.batch)
    crossing = {name for edge in plan.dag.data for name in edge.values if not name.startswith("residuals")}
    scalars = [name for name in crossing if plan.dag.values[name].shape == ()]
    assert scalars == []


def _balanced_without_metrics(model: Any, batch: Any) -> Any:
    return _balanced(model, batch)[0]


# -- padding ----------------------------------------------------------------------------------------------
def _weighted_with_extra(model: Any, batch: Any) -> Any:
    mask = batch["mask"].astype(jnp.float32)
    x, extra = model.embed(batch["x"]), 0.0
    for layer in model.layers:
        with piper.annotate("PP"):
            x = layer(x)
            extra += 0.01 * jnp.mean(x**2)
    return piper.WeightedLoss((cross_entropy(model.head(x), batch["y"]) * mask).sum(), mask.sum(), extra)


@pytest.fixture(scope="module", params=[weighted_loss, _weighted_with_extra], ids=["plain", "extra"])
def weighted(request: pytest.FixtureRequest) -> Problem:
    return Problem(loss_fn=request.param, params=Tower(), batch=tokens())


@pytest.mark.parametrize("layout", FEWER, ids=str)
def test_padding_is_weighted_exactly(weighted: Problem, layout: dict[str, Any]) -> None:
    assert_equivalent(weighted, strategy(**layout))


def test_a_weighted_loss_is_that_of_the_whole_batch() -> None:
    model, batch = Tower(), tokens()

    def whole(m: Any, batch: Any) -> Any:
        mask = batch["mask"].astype(jnp.float32)
        return (cross_entropy(m(batch["x"]), batch["y"]) * mask).sum() / mask.sum()

    loss, expected = nnx.value_and_grad(whole)(model, batch)
    train = piper.parallelize(
        weighted_loss, model, batch, strategy=strategy(stages=2, data=2, microbatches=6, schedule="GPipe")
    )
    state = train.init(model)
    assert_close(train.gradients(state, batch), expected, TOLERANCES["float32"], "gradient")
    np.testing.assert_allclose(train.evaluate(state, batch)["loss"], loss, rtol=1e-5)
    one_empty = batch | {"mask": jnp.asarray(batch["mask"]).at[:2].set(False)}  # the first slice
    np.testing.assert_allclose(train.evaluate(state, one_empty)["loss"], whole(model, one_empty), rtol=1e-5)
    empty = batch | {"mask": jnp.zeros_like(batch["mask"])}
    assert np.isnan(whole(model, empty))
    assert np.isnan(train.evaluate(state, empty)["loss"])
    for found in (train.gradients(state, empty), nnx.jit(nnx.grad(whole))(model, empty)):
        assert jax.tree.all(jax.tree.map(lambda leaf: jnp.all(jnp.isnan(leaf) | (leaf == 0)), found))


# -- statistics of a microbatch -----------------------------------------------------------------------------
@jax.checkpoint
def _less_its_mean(x: Any, part: Any) -> Any:
    return x - part * piper.mean_over_replicas(jnp.tanh(x).mean((0, 1))), None


def _normalized(model: Any, batch: Any) -> Any:
    """Batch normalization by the moments of the whole microbatch, and a product of two means as balance loss."""
    x, balance = model.embed(batch["x"]), 0.0
    for layer in model.layers:
        with piper.annotate("PP"):
            mean = piper.mean_over_replicas(x.mean((0, 1)))
            variance = piper.mean_over_replicas(((x - mean) ** 2).mean((0, 1)))
            x = layer((x - mean) * jax.lax.rsqrt(variance + 1e-3))
            share = piper.mean_over_replicas({"s": jax.nn.softmax(x).mean((0, 1))})["s"]
            balance += (share * share).sum()
            x = jax.lax.scan(_less_its_mean, x, jnp.linspace(0.1, 0.2, 2))[0]
    return cross_entropy(model.head(x), batch["y"]).mean() + 0.1 * balance


@pytest.fixture(scope="module")
def normalized() -> Problem:
    return Problem(loss_fn=_normalized, params=Tower(), batch=tokens(), optimizer=momentum())


@pytest.mark.parametrize(
    "layout", [{"stages": 2, "data": 2, "microbatches": 3}, {"stages": 1, "data": 4, "microbatches": 2}], ids=str
)
def test_statistics_of_a_whole_microbatch(normalized: Problem, layout: dict[str, Any]) -> None:
    assert_equivalent(normalized, strategy(**layout))


def test_they_depend_on_microbatches_alone(normalized: Problem) -> None:
    """The same microbatches on one, two and four replicas: the same gradient, so no replica saw its own rows only."""
    gradients = []
    for data in (1, 2, 4):
        train = piper.parallelize(
            normalized.loss_fn, normalized.params, normalized.batch, strategy=strategy(data=data, microbatches=2)
        )
        gradients.append(train.gradients(train.init(normalized.params), normalized.batch))
    for other in gradients[1:]:
        assert_close(other, gradients[0], TOLERANCES["float32"], "gradient")
    assert jax.tree.structure(gradients[0]) == jax.tree.structure(trainable_part(normalized.params))
    assert DIM
