"""Schedules with BI and BW over a stage whose backward stays in one piece, and over one whose BI is empty."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Problem, assert_equivalent, momentum, strategy
from tiny_models import DIM, VOCAB, cross_entropy, tokens

import piper_jax as piper


def looped(weight: Any, x: Any) -> Any:
    """One scan over the whole layer, so one equation of its backward gives cotangent and gradient."""
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ weight), None), x, None, length=3)[0]


def frozen(weight: Any, x: Any) -> Any:
    return jnp.tanh(x @ jax.lax.stop_gradient(weight))


def model_of(middle: Any, *, lookup: bool = False) -> Problem:
    """Embedding, four layers of which the third is ``middle``, tied head; ``lookup``: the first unit only embeds."""

    def loss(params: Any, batch: Any) -> Any:
        if lookup:
            with piper.annotate("PP"):
                x = params["table"][batch["x"]]
        else:
            x = params["table"][batch["x"]]
        for k, weight in enumerate(params["layers"]):
            with piper.annotate("PP"):
                x = x + (middle(weight, x) if k == 2 else jnp.tanh(x @ weight))
        return cross_entropy(x @ params["table"].T, batch["y"]).mean()

    random = np.random.default_rng(0)
    layers = [jnp.asarray(0.4 * random.normal(size=(DIM, DIM)), jnp.float32) for _ in range(4)]
    params = {"table": jnp.asarray(random.normal(size=(VOCAB, DIM)), jnp.float32), "layers": layers}
    return Problem(loss_fn=loss, params=params, batch=tokens(), optimizer=momentum(), steps=2)


def backwards(plan: piper.Plan) -> dict[int | None, set[str | None]]:
    """The backward passes of each stage."""
    found: dict[int | None, set[str | None]] = {}
    for node in plan.dag.nodes:
        if node.PASS in ("B", "BI", "BW"):
            found.setdefault(node.PP, set()).add(node.PASS)
    return found


@pytest.mark.parametrize(
    ("schedule", "ranks", "data", "middle", "why"),
    [
        ("ZBH1", 4, 2, looped, "one `scan` at test_whole_backwards.py:"),
        ("DualPipeV", 2, 2, looped, "one `scan` at test_whole_backwards.py:"),
        ("ZBV", 2, 1, frozen, "it has no trainable parameters"),
    ],
)
def test_one_stage_stays_whole_and_the_step_is_the_same(
    schedule: str, ranks: int, data: int, middle: Any, why: str
) -> None:
    layout = strategy(stages=ranks, data=data, microbatches=4, schedule=schedule)
    train = assert_equivalent(model_of(middle), layout)
    passes = backwards(train.plan)
    assert passes.pop(2) == {"B"}
    assert all({"BI", "BW"} <= found for found in passes.values())
    assert why in str(train.plan)
    assert [op.PP for op in train.plan.dag.ops.values() if op.kept_whole] == [2]


def test_a_stage_that_only_looks_up_has_an_empty_first_half() -> None:
    train = assert_equivalent(model_of(looped, lookup=True), strategy(stages=5, microbatches=4, schedule="ZBH1"))
    assert backwards(train.plan)[0] == {"BI", "BW"}
    assert backwards(train.plan)[3] == {"B"}
    assert next(iter(train.plan.dag.ops.values())).flops_backward_input == 0
