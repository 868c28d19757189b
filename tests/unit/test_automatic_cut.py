"""Stages of the presets beside the best contiguous stages, found by exact dynamic programming."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest

import piper_jax as piper
from piper_jax.models import gpt, moe


@cache
def traced(name: str, preset: str) -> piper.Plan:
    model = {"gpt": gpt, "moe": moe}[name].language_model(preset=preset)
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    return piper.trace(model.loss_fn, params, {"tokens": tokens, "targets": tokens}, optimizer=optax.sgd(0.1))


def costs(plan: piper.Plan) -> list[int]:
    """FLOPs of forward and backward of each pipeline unit or stage, embedding and head included."""
    found: dict[int, int] = {}
    for op in plan.dag.ops.values():
        own = op.flops_forward + op.flops_backward_input + op.flops_backward_weight
        found[op.PP or 0] = found.get(op.PP or 0, 0) + own
    return [found[stage] for stage in sorted(found)]


def best(units: list[int], stages: int) -> int:
    """The smallest possible largest stage."""
    largest = [sum(units[: end + 1]) for end in range(len(units))]
    for _ in range(stages - 1):
        largest = [
            min((max(largest[k], sum(units[k + 1 : end + 1])) for k in range(end)), default=units[0])
            for end in range(len(units))
        ]
    return largest[-1]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "preset"), [("gpt", "tiny"), ("moe", "tiny"), ("moe", "deepseek_tiny"), ("moe", "9M")]
)
def test_the_largest_stage_is_at_most_5_percent_above_the_best(name: str, preset: str, stages: int) -> None:
    plan = traced(name, preset)
    cut = costs(plan.cut(stages=stages))
    assert len(cut) == stages
    assert sum(cut) == sum(costs(plan))
    assert max(cut) <= 1.05 * best(costs(plan), stages)
