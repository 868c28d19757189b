"""Stages of the presets beside the best contiguous stages, found by exact dynamic programming."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import piper_jax as piper
from piper_jax.errors import PlanError
from piper_jax.models import gpt, moe
from piper_jax.tracing.costs import eqn_flops


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


def _equations(plan: piper.Plan) -> list[int]:
    """FLOPs of each equation on activations, forward."""
    program, unit = plan.source.program, plan.source.units.of_eqn  # type: ignore[attr-defined]
    return [eqn_flops(eqn.eqn) for eqn, u in zip(program.flat.eqns, unit, strict=True) if u is not None]


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize(
    "dims", [(8, 512, 384, 256, 192, 128, 64, 8), (8, *range(16, 200, 16), 8), (8, 32, 32, 32, 32, 32, 32, 32, 8)]
)
def test_stages_without_regions_are_near_the_best_over_single_equations(dims: tuple[int, ...], stages: int) -> None:
    """Widths that only shrink, only grow, or are equal."""

    def loss_fn(kernels: Any, x: Any) -> Any:
        for kernel in kernels:
            x = jnp.tanh(x @ kernel)
        return (x**2).mean()

    kernels = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in pairwise(dims)]
    plan = piper.trace(loss_fn, kernels, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    largest = max(op.flops_forward for op in plan.cut(stages=stages).dag.ops.values())
    assert largest <= 1.05 * best(_equations(plan), stages)


def _wide_first_layers(dims: list[int]) -> piper.Plan:
    """Layers of equal work on fewer and fewer parameters: the work of a layer is said by how often it is repeated."""

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch
        for k, (up, down) in enumerate(params):
            with piper.annotate("PP"):
                for _ in range(dims[0] // dims[k]):
                    x = jnp.tanh(x @ up) @ down
        return (x**2).mean()

    shapes = [
        (jax.ShapeDtypeStruct((8, dim), jnp.float32), jax.ShapeDtypeStruct((dim, 8), jnp.float32)) for dim in dims
    ]
    return piper.trace(loss_fn, shapes, jax.ShapeDtypeStruct((16, 8), jnp.float32), optimizer=optax.adamw(0.1))


def _needed(plan: piper.Plan) -> list[int]:
    return [group.memory.needed_bytes for group in piper.simulate(plan).groups]


@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_stages_move_until_they_fit_into_memory(schedule: str) -> None:
    plan = _wide_first_layers([4096, 4096, 2048, 1024, 512, 512, 256, 256])
    plain = piper.Strategy(pipeline_parallel=2, directives=(piper.directive(schedule),))
    fast = plan.apply(plain)
    limit = max(_needed(fast)) * 9 // 10
    fitting = plan.apply(dataclasses.replace(plain, memory_limit=limit))
    assert max(_needed(fitting)) <= limit < max(_needed(fast))
    assert max(costs(fitting)) >= max(costs(fast))
    assert plan.apply(dataclasses.replace(plain, memory_limit=max(_needed(fast)))) == fast


def test_where_nothing_fits_the_least_limit_found_is_named() -> None:
    plan = _wide_first_layers([4096, 4096, 512, 512])
    said = r"^Strategy at test_automatic_cut.py:\d+: no cut into 2 stages was found with 1\.00 KiB on each device"
    with pytest.raises(PlanError, match=said) as caught:
        plan.apply(piper.Strategy(pipeline_parallel=2, memory_limit=1024))
    needed = int(re.findall(r"memory_limit=(\d+) fits", caught.value.help)[0])
    assert max(_needed(plan.apply(piper.Strategy(pipeline_parallel=2, memory_limit=needed)))) <= needed


def test_stages_that_are_given_are_only_checked() -> None:
    plan = _wide_first_layers([4096, 4096, 512, 512])
    with pytest.raises(PlanError, match=r"^Strategy at test_automatic_cut.py:\d+: fits-in-memory: "):
        plan.apply(piper.Strategy(pipeline_parallel=2, memory_limit=1024, stages=("0, 1", "2, 3")))


def test_what_lies_between_arrays_has_the_name_of_the_array_before() -> None:
    def loss_fn(params: Any, x: Any) -> Any:
        for w in params["l"]:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    plan = piper.trace(loss_fn, {"l": [w] * 3}, w)
    assert [*plan.dag.ops][:5] == ["l.0", "l.0#2", "l.1", "l.1#2", "l.2"]
    assert [*plan.cut(stages=["l.0", "l.1-2"]).dag.ops] == ["l.0", "l.1-2"]


@pytest.mark.parametrize("wrapped", [jax.checkpoint, lambda f: jax.jit(jax.checkpoint(jax.jit(f)))], ids=["", "jit"])
def test_a_model_inside_one_checkpoint_is_cut_and_each_stage_is_checkpointed(wrapped: Any) -> None:
    def loss_fn(params: Any, x: Any) -> Any:
        for up, down in params:
            x = jnp.tanh(x @ up) @ down
        return (x**2).mean()

    w, x = jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    layers = [(w, jax.ShapeDtypeStruct((64, 8), jnp.float32))] * 4
    plain = piper.trace(loss_fn, layers, x).cut(stages=[f"{k}" for k in range(4)])
    again = piper.trace(wrapped(loss_fn), layers, x).cut(stages=[f"{k}" for k in range(4)])
    assert [*again.dag.ops] == [*plain.dag.ops]
    residuals = [[op.residual_bytes for op in plan.dag.ops.values()] for plan in (plain, again)]
    assert all(kept > computed for kept, computed in zip(*residuals, strict=True))


def test_a_derivative_taken_inside_a_region_is_in_no_region_inside_it() -> None:
    def loss_fn(params: Any, x: Any) -> Any:
        for w in params:
            with piper.annotate("PP"):
                x = x - jax.grad(lambda x, w=w: (jax.nn.relu(x @ w) ** 2).sum())(x)
        return (x**2).mean()

    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert [op.PP for op in piper.trace(loss_fn, [w] * 3, w).dag.ops.values()] == [0, 1, 2]
