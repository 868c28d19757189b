"""Auxiliary outputs: how slices are put together, whatever the layout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracle import momentum, strategy
from tiny_models import Tower, cross_entropy, tokens

import piper_jax as piper

NUM_SLICES, ROWS = 8, 24


def _loss(model: Any, batch: Any) -> Any:
    x, norms = model.embed(batch["x"]), []
    for layer in model.layers:
        with piper.annotate("PP"):
            x = layer(x)
            norms.append((x**2).mean())
    logits = model.head(x)
    losses = cross_entropy(logits, batch["y"])
    return losses.mean(), {
        "accuracy": (logits.argmax(-1) == batch["y"]).mean(),
        "correct": (logits.argmax(-1) == batch["y"]).sum(),
        "norms": norms,
        "total": piper.Sum(losses.sum()),
        "rows": batch["x"].shape[0],
        "half": piper.Mean({"of": jnp.float32(0.5)}),
        "last": piper.Last(batch["x"].sum()),
        "per sample": losses,
        "prediction": logits.argmax(-1),
        "histogram": jnp.bincount(batch["x"].reshape(-1), length=11),
    }


@pytest.fixture(scope="module", params=[(1, 2, 4), (4, 2, 4), (2, 4, 2)], ids=str)
def found(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    stages, data, microbatches = request.param
    model, batch = Tower(), tokens(ROWS)
    train = piper.parallelize(
        _loss,
        model,
        batch,
        optimizer=momentum(),
        strategy=strategy(stages=stages, data=data, microbatches=microbatches),
    )
    state = train.init(model)
    evaluated = train.evaluate(state, batch)
    _, stepped = train.step(state, batch)
    return {"evaluate": evaluated, "step": stepped}


@pytest.mark.parametrize("mode", ["evaluate", "step"])
def test_metrics_of_all_slices(found: dict[str, dict[str, Any]], mode: str) -> None:
    metrics, batch = found[mode], tokens(ROWS)
    loss, whole = _loss(Tower(), batch)
    assert all(isinstance(v, jax.Array) for v in jax.tree.leaves(metrics))
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(float(whole["accuracy"]), rel=1e-5)
    assert int(metrics["correct"]) == int(whole["correct"])
    np.testing.assert_allclose(metrics["norms"], whole["norms"], rtol=1e-5)
    np.testing.assert_allclose(metrics["total"], whole["total"].value, rtol=1e-5)
    assert int(metrics["rows"]) == ROWS
    assert float(metrics["half"]["of"]) == 0.5
    assert int(metrics["last"]) == batch["x"][-ROWS // NUM_SLICES :].sum()
    np.testing.assert_allclose(metrics["per sample"], whole["per sample"], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(metrics["prediction"], whole["prediction"])
    np.testing.assert_array_equal(metrics["histogram"], whole["histogram"])


def test_outputs_that_are_not_a_dictionary() -> None:
    def loss(model: nnx.Module, batch: Any) -> Any:
        logits = model(batch["x"])
        return cross_entropy(logits, batch["y"]).mean(), (logits.mean(), [logits.sum((1, 2))])

    model, batch = Tower(), tokens()
    train = piper.parallelize(loss, model, batch, optimizer=momentum(), strategy=strategy(stages=2, microbatches=2))
    metrics = train.evaluate(train.init(model), batch)
    mean, (sums,) = metrics["aux"]
    np.testing.assert_allclose(mean, model(batch["x"]).mean(), rtol=1e-4, atol=1e-6)
    assert sums.shape == (24,)


def test_what_slices_hand_on_differs_between_them() -> None:
    """A counter is another number for each microbatch, though no batch changes it; a norm of parameters is not."""

    def loss_fn(params: Any, batch: Any) -> Any:
        n, w = params["n"], params["w"]
        aux = {"n": n, "rate": 0.1 * n, "norm": jnp.sum(w**2), "state": piper.Carried({"n": n + 1})}
        return jnp.mean(jnp.tanh(batch @ w)), aux

    params = {"n": jnp.asarray(0, jnp.int32), "w": jnp.ones((3, 3))}
    program = piper.trace(loss_fn, params, jnp.ones((4, 3)), optimizer=optax.sgd(0.1)).source.program
    assert {m.path: m.kind for m in program.metrics} == {"n": "sum", "rate": "mean", "norm": "last"}
