"""Bytes that one device really holds beside the simulated ones: at the peak of every group, and what ZeRO saves."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from carrying_model import Net, regression, rows
from dry_run import peaks
from flax import nnx
from oracle import Problem, adamw, strategy
from test_experts import DROPLESS, SIGMOID
from test_experts import problem as mixture
from tiny_models import Tower, mean_loss, tokens

import piper_jax as piper

REPLICAS = 8
PADDING = 0.03
ROWS = 32
LAYERS = 8
MANY = 768


def problem(layers: int) -> Problem:
    return Problem(loss_fn=mean_loss, params=Tower(layers=layers), batch=tokens(ROWS), optimizer=adamw())


def zero(stage: int, schedule: str, *, data: int, microbatches: int, pipeline: int = 1) -> piper.Strategy:
    directives = (piper.directive(schedule), *((piper.directive(f"ZeRO-{stage}"),) if stage else ()))
    degrees = {"data_parallel": data, "pipeline_parallel": pipeline, "num_microbatches": microbatches}
    return piper.Strategy(**degrees, directives=directives)


def layer_by_layer(distance: int, microbatches: int) -> piper.Strategy:
    """Every layer a stage of its own, all on one group."""
    stages = piper.directive("Interleaved1F1B", num_virtual_stages=LAYERS)
    gathered = piper.directive("ZeRO-3", gather_distance=distance)
    return piper.Strategy(data_parallel=4, num_microbatches=microbatches, directives=(stages, gathered))


def bytes_at_rest(stage: int) -> int:
    """Parameters, optimizer state and gradient accumulators on the first device after a step."""
    found = problem(4)
    train = found.parallelize(zero(stage, "GPipe", data=REPLICAS, microbatches=2))
    state, _ = train.step(train.init(found.params), found.batch)
    arrays = [a for a in state.arrays if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)]
    shards = (s for a in (*arrays, *train._accumulators.values()) for s in a.addressable_shards)
    return sum(s.data.nbytes for s in shards if s.device == train.devices[0])


def parameter_peak(report: piper.Report) -> int:
    return report.groups[0].memory.peak_of_kind("parameters").parameters


def test_bytes_between_steps() -> None:
    plain, one, two, three = (bytes_at_rest(stage) for stage in range(4))
    assert three <= (1 / REPLICAS + PADDING) * plain
    assert three < two < one < plain


# -- the peak of every group: of the schedules, with fused and with separate passes, ZeRO, remat -------------------
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBH1", "ZBV", "DualPipeV", "DualPipe")
SOME = {("1F1B", 2, 2, True), ("1F1B", 2, 3, False), ("Interleaved1F1B", 2, 3, False), ("DualPipe", 2, 2, False)}
RUN = {("1F1B", 2, 2, False), ("ZBV", 1, 0, True)}


def tower(schedule: str, data: int, stage: int, remat: bool, **options: Any) -> piper.Plan:
    """Four blocks on two groups: of 1F1B the last stage has F and B in one program, the first has not."""
    directives = (piper.directive(schedule), *((piper.directive(f"ZeRO-{stage}", **options),) if stage else ()))
    directives += (piper.directive("ActivationCheckpointing"),) if remat else ()
    degrees = {"data_parallel": data, "pipeline_parallel": 2, "num_microbatches": 4}
    return traced().apply(piper.Strategy(**degrees, directives=directives))


@cache
def traced() -> piper.Plan:
    found = problem(4)
    return piper.trace(found.loss_fn, found.params, found.batch, optimizer=found.optimizer)


def cells() -> list[Any]:
    plain = [(schedule, 1, 0, remat) for schedule in SCHEDULES for remat in (False, True)]
    zero = [(schedule, 2, stage, remat) for schedule in SCHEDULES for stage in range(4) for remat in (False, True)]
    return [pytest.param(*c, marks=() if c in SOME or c in plain else pytest.mark.full) for c in (*plain, *zero)]


def assert_peaks(found: dict[str, int], plan: piper.Plan, zero: int) -> None:
    for group in piper.simulate(plan).groups:
        assert group.memory.peak_bytes == pytest.approx(found[group.name], rel=0.03 if zero else 0.02), group.name


@pytest.mark.parametrize(("schedule", "data", "zero", "remat"), cells())
def test_the_simulated_peak_is_that_of_the_registers(schedule: str, data: int, zero: int, remat: bool) -> None:
    plan = tower(schedule, data, zero, remat)
    assert_peaks(peaks(plan, ROWS), plan, zero)


@pytest.mark.parametrize(
    ("schedule", "data", "zero", "remat"),
    [pytest.param(*c.values, marks=() if c.values in RUN else pytest.mark.full) for c in cells()],
)
def test_the_simulated_peak_is_the_measured_one(schedule: str, data: int, zero: int, remat: bool) -> None:
    plan, found = tower(schedule, data, zero, remat), problem(4)
    train = piper.compile(plan)
    measured = {g.name: g.memory.peak_bytes for g in train.profile(train.init(found.params), found.batch).groups}
    assert_peaks(measured, plan, zero)
    assert measured == peaks(plan, ROWS)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_higher_stage_never_holds_more_at_its_peak(schedule: str) -> None:
    """Of optimizer state and gradients; what ZeRO-3 gathers is another matter. Overlap holds gradients for longer."""
    plain, one, two = (piper.simulate(tower(schedule, 2, stage, False)).groups for stage in range(3))
    for groups in zip(plain, one, two, strict=True):
        held = [group.memory.peak_bytes for group in groups]
        assert held == sorted(held, reverse=True)
    overlapped = piper.simulate(tower(schedule, 2, 2, False, communication_overlap=True)).groups
    assert all(b.memory.peak_bytes >= a.memory.peak_bytes for a, b in zip(two, overlapped, strict=True))


def test_what_an_optimizer_needs_whole_and_other_shapes_of_models() -> None:
    """Several rounds of updates that gather state, tied weights, a value that skips stages, 16 bits."""
    models = (Tower(layers=2), Tower(layers=2, tied=True), Tower(layers=2, skip=True), half(Tower(layers=2)))
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1))
    for model, optimizer in zip(models, (clipped, *[adamw()] * 3), strict=True):
        found = piper.trace(mean_loss, model, tokens(ROWS), optimizer=optimizer)
        for stage in (0, 2, 3):
            plan = found.apply(zero(stage, "1F1B", data=2, microbatches=4, pipeline=2))
            assert_peaks(peaks(plan, ROWS), plan, stage)


def test_carried_state() -> None:
    for in_turn, schedule in ((True, "1F1B"), (False, "DualPipe")):
        found = piper.trace(regression, Net(in_turn=in_turn), rows(MANY), optimizer=adamw())
        plan = found.apply(zero(0, schedule, data=2, microbatches=4, pipeline=2))
        assert_peaks(peaks(plan, MANY), plan, 0)


def test_the_batch_is_counted_where_programs_read_it() -> None:
    """Leaves of the rows, of all slices, and of the weight of the loss alone: more than all else together."""

    def loss(model: Tower, batch: dict[str, Any]) -> piper.WeightedLoss:
        error = jnp.mean(model(batch["x"]) ** 2, (1, 2)) * batch["scale"]
        return piper.WeightedLoss(jnp.sum(error), jnp.sum(batch["wide"]))

    wide = {"x": tokens(ROWS)["x"], "scale": jnp.float32(2), "wide": jnp.ones((ROWS, 500))}
    found = piper.trace(loss, Tower(layers=2), wide, optimizer=adamw())
    for data in (1, 2):
        plan = found.apply(zero(0, "1F1B", data=data, microbatches=4, pipeline=2))
        first, last = (group.memory.peak.batch for group in piper.simulate(plan).groups)
        assert (first, last) == (wide["x"].nbytes // data, wide["wide"].nbytes // data + 4)
        assert_peaks(peaks(plan, ROWS), plan, 0)


@pytest.mark.parametrize("config", [SIGMOID, DROPLESS], ids=["capacity", "dropless"])
def test_experts_and_the_room_for_their_rows(config: dict[str, Any]) -> None:
    found = mixture(config | {"num_layers": 1})
    traced = piper.trace(found.loss_fn, found.params, found.batch, optimizer=found.optimizer)
    plan = traced.apply(strategy(expert_parallel=2, data=2, microbatches=1, zero_stage=3))
    assert_peaks(peaks(plan, plan.source.batch.size), plan, 3)


def half(model: Tower) -> Tower:
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda v: v.astype(jnp.bfloat16), state))


# -- what is gathered ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("distance", [0, 1, 2, 3])
def test_gathered_parameters_grow_with_the_distance_alone(distance: int) -> None:
    """As many stages are whole at once as gathers run ahead, and one; whatever the microbatches."""
    found = problem(LAYERS)
    traced = piper.trace(found.loss_fn, found.params, found.batch, optimizer=found.optimizer)
    plans = [traced.apply(layer_by_layer(distance, microbatches)) for microbatches in (4, 8)]
    few, more = [parameter_peak(piper.simulate(plan)) for plan in plans]
    assert more == few
    buckets = {b.name: sum(leaf.nbytes for leaf in b.leaves) for b in plans[0].dag.buckets.values()}
    by_stage = sorted(sum(buckets[name] for name in op.reads) for op in plans[0].dag.ops.values())
    assert few - sum(buckets.values()) / 4 == pytest.approx(sum(by_stage[-1 - distance :]), rel=0.1)


@pytest.mark.full
def test_gathered_parameters_as_measured() -> None:
    found = problem(LAYERS)
    train = found.parallelize(layer_by_layer(1, 2))
    measured = parameter_peak(train.profile(train.init(found.params), found.batch))
    assert parameter_peak(piper.simulate(train.plan)) == pytest.approx(measured, rel=0.03)
