"""Auxiliary outputs and predictions are the model's own, wherever the microbatches of its last stage run."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import piper_jax as piper

ROWS, WIDTH = 16, 4


def apply(params: Any, batch: Any) -> Any:
    x = batch["x"]
    for weight in params:
        with piper.annotate("PP"):
            x = x + jnp.tanh(x @ weight)
    return x


def loss_fn(params: Any, batch: Any) -> Any:
    out = apply(params, batch)
    outputs = {"out": out, "positive": (out > 0).sum(), "mean": out.mean(), "three": 3, "size": out.size}
    return jnp.mean((out - batch["y"]) ** 2), outputs


@pytest.fixture(scope="module")
def problem() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32) for _ in range(2)]
    return params, {name: rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in ("x", "y")}


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipe"])
def test_outputs_of_a_stage_on_one_or_two_groups(schedule: str, problem: tuple[Any, Any]) -> None:
    params, batch = problem
    strategy = piper.Strategy(pipeline_parallel=2, num_microbatches=4, directives=(piper.directive(schedule),))
    train = piper.parallelize(loss_fn, params, batch, optimizer=optax.sgd(0.1), strategy=strategy)
    state = train.init(params)
    out = np.asarray(apply(params, batch))
    np.testing.assert_allclose(train.predict(state, batch, apply), out, rtol=2e-5, atol=1e-6)
    nested = train.predict(state, batch, lambda p, b: {"aux": apply(p, b), "loss": apply(p, b).sum(0)})
    np.testing.assert_allclose(nested["aux"], out, rtol=2e-5, atol=1e-6)
    _, metrics = train.step(state, batch)
    np.testing.assert_allclose(metrics["out"], out, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["mean"], out.mean(), rtol=2e-5)
    assert int(metrics["positive"]) == int((out > 0).sum())
    assert (int(metrics["three"]), int(metrics["size"])) == (3, out.size)


def test_predict_and_evaluate_with_one_microbatch(problem: tuple[Any, Any]) -> None:
    params, batch = problem
    strategy = piper.Strategy(data_parallel=2)
    train = piper.parallelize(loss_fn, params, batch, optimizer=optax.sgd(0.1), strategy=strategy)
    state = train.init(params)
    np.testing.assert_allclose(train.predict(state, batch, apply), apply(params, batch), rtol=2e-5, atol=1e-6)
    other = train.evaluate(state, batch, lambda p, b: loss_fn(p, b)[0] * 2)["loss"]
    np.testing.assert_allclose(other, 2 * loss_fn(params, batch)[0], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (lambda loss, out: None, "is a return missing?"),
        (lambda loss, out: {"loss": loss}, "returned a dict as its loss"),
        (lambda loss, out: (loss, 1, 2), "returned a tuple as its loss"),
        (lambda loss, out: (loss, {"turned": out.T}), "turned has the batch on dimension 1"),
    ],
)
def test_outputs_that_cannot_be_combined_are_refused(outputs: Any, text: str, problem: tuple[Any, Any]) -> None:
    params, batch = problem
    with pytest.raises(piper.TraceError, match="(?s)" + text.replace("?", r"\?")):
        piper.trace(lambda p, b: outputs(loss_fn(p, b)[0], apply(p, b)), params, batch)


def test_a_batch_without_rows_is_refused(problem: tuple[Any, Any]) -> None:
    params, batch = problem
    with pytest.raises(piper.TraceError, match="has no rows"):
        piper.trace(loss_fn, params, {name: rows[:0] for name, rows in batch.items()})
