"""The GPTs of the package, in NNX and in Linen, and mixed precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Problem, assert_equivalent, momentum, strategy
from tiny_models import Tower, cross_entropy

import piper_jax as piper
from piper_jax.models import gpt, gpt_linen

pytestmark = pytest.mark.sample
SIZES = {"num_layers": 3, "dim": 8, "num_heads": 2, "mlp_dim": 8, "vocab_size": 11}


def text(rows: int = 8, length: int = 4) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (rows, length + 1), dtype=np.int32)
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}


def gpt_problem(module: Any, *, scale: float = 8.0, **changes: Any) -> Problem:
    """A GPT whose kernels are ``scale`` times the usual, so that its predictions are far from uniform."""
    model = module.language_model(preset="tiny", **{**SIZES, **changes})
    params = jax.tree.map(lambda v: scale * v if v.ndim > 1 else v, model.init(jax.random.key(0)))
    return Problem(loss_fn=model.loss_fn, params=params, batch=text())


@pytest.mark.parametrize("module", [gpt, pytest.param(gpt_linen, marks=pytest.mark.full)], ids=["nnx", "linen"])
@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({"dropout": 0.2, "num_layers": 2}, {"stages": 2, "data": 2, "microbatches": 2, "schedule": "GPipe"}),
        ({"tied_embeddings": True}, {"stages": 3, "data": 2, "microbatches": 4}),
    ],
    ids=["dropout", "tied"],
)
def test_gpt(module: Any, changes: dict[str, Any], layout: dict[str, Any]) -> None:
    assert_equivalent(gpt_problem(module, **changes), strategy(**layout))


def test_both_give_the_same_stages() -> None:
    nnx, linen = (gpt_problem(m) for m in (gpt, gpt_linen))
    plans = [piper.trace(p.loss_fn, p.params, p.batch).cut(stages=3) for p in (nnx, linen)]
    stages = [[(op.units, op.flops_forward, op.residual_bytes) for op in plan.dag.ops.values()] for plan in plans]
    assert stages[0] == stages[1]


@pytest.mark.full
def test_bf16_gpt_with_float32_parameters() -> None:
    problem = gpt_problem(gpt, scale=1.0, compute_dtype="bfloat16")
    problem.batch = text(rows=16, length=6)
    problem.precision, problem.optimizer = "bfloat16", momentum(0.02)
    assert_equivalent(problem, strategy(stages=2, data=2, microbatches=2))


def test_bf16_activations_between_stages() -> None:
    """Activations and their cotangents cross as bfloat16; gradients add up in float32."""

    def loss(model: Any, batch: Any) -> Any:
        x = model.embed(batch["x"]).astype(jnp.bfloat16)
        for layer in model.layers:
            with piper.annotate("PP"):
                x = layer(x.astype(jnp.float32)).astype(jnp.bfloat16)
        return cross_entropy(model.head(x.astype(jnp.float32)), batch["y"]).mean()

    batch = {"x": text()["tokens"], "y": text()["targets"]}
    problem = Problem(loss_fn=loss, params=Tower(), batch=batch, precision="bfloat16", optimizer=momentum())
    train = assert_equivalent(problem, strategy(stages=4, data=2, microbatches=4))
    sent = {v for n in train.plan.complete().nodes.values() for v in getattr(n, "values", ()) if "convert" in v}
    assert sent
    assert {train.plan.dag.values[v].dtype for v in sent} == {"bfloat16"}


def test_bf16_parameters() -> None:
    """All in bfloat16: gradients still add up in float32 and are rounded once."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for kernel in params["layers"]:
            with piper.annotate("PP"):
                x = x + jnp.tanh(x @ kernel)
        return (x.astype(jnp.float32) ** 2).mean()

    kernels = jax.random.normal(jax.random.key(0), (4, 6, 6), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (16, 6), jnp.bfloat16)
    problem = Problem(
        loss_fn=loss, params={"layers": list(kernels)}, batch={"x": x}, precision="bfloat16", optimizer=momentum()
    )
    train = problem.parallelize(strategy(stages=2, data=2, microbatches=4))
    state = train.init(problem.params)
    expected = problem.reference(4, 2)
    for found, known in zip(
        jax.tree.leaves(train.gradients(state, problem.batch)), jax.tree.leaves(expected.gradients), strict=True
    ):
        assert found.dtype == known.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            found.astype(np.float32), known.astype(np.float32), atol=2e-2 * float(jnp.abs(known).max())
        )
