"""Bytes that one device really holds beside the simulated ones: what ZeRO saves, what split backwards keep."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from oracle import Problem, adamw
from tiny_models import Tower, mean_loss, tokens

import piper_jax as piper

REPLICAS = 8
PADDING = 0.03
LAYERS = 8


def problem(layers: int) -> Problem:
    return Problem(loss_fn=mean_loss, params=Tower(layers=layers), batch=tokens(32), optimizer=adamw())


def zero(stage: int, schedule: str, *, data: int, microbatches: int, **options: Any) -> piper.Strategy:
    directives = (piper.directive(schedule), *((piper.directive(f"ZeRO-{stage}", **options),) if stage else ()))
    return piper.Strategy(data_parallel=data, num_microbatches=microbatches, directives=directives)


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


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full), 3]
)
def test_the_simulated_peak_is_the_measured_one(stage: int) -> None:
    found = problem(4)
    train = found.parallelize(zero(stage, "GPipe", data=4, microbatches=2))
    measured = train.profile(train.init(found.params), found.batch)
    assert piper.simulate(train.plan).peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)


@pytest.mark.parametrize("distance", [0, 1, 2, 3])
def test_gathered_parameters_grow_with_the_distance_alone(distance: int) -> None:
    """As many stages are whole at once as gathers run ahead, and one; whatever the microbatches."""
    found = problem(LAYERS)
    traced = piper.trace(found.loss_fn, found.params, found.batch, optimizer=found.optimizer)
    plans = [traced.apply(layer_by_layer(distance, microbatches)) for microbatches in (2, 4, 8)]
    few, *more = [parameter_peak(piper.simulate(plan)) for plan in plans]
    assert more == [few, few]
    buckets = {b.name: sum(leaf.nbytes for leaf in b.leaves) for b in plans[0].dag.buckets.values()}
    by_stage = sorted(sum(buckets[name] for name in op.reads) for op in plans[0].dag.ops.values())
    assert few - sum(buckets.values()) / 4 == pytest.approx(sum(by_stage[-1 - distance :]), rel=0.1)


def test_gathered_parameters_as_measured() -> None:
    found = problem(LAYERS)
    train = found.parallelize(layer_by_layer(1, 2))
    measured = parameter_peak(train.profile(train.init(found.params), found.batch))
    assert parameter_peak(piper.simulate(train.plan)) == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("remat", [False, True])
def test_the_peak_of_split_backwards(remat: bool) -> None:
    """On stages whose passes are programs of their own, what BI leaves for BW is what the simulator takes it to be."""
    found = problem(8)
    directives = (piper.directive("ZBH1"), *((piper.directive("ActivationCheckpointing"),) if remat else ()))
    train = found.parallelize(piper.Strategy(pipeline_parallel=4, num_microbatches=8, directives=directives))
    measured, simulated = train.profile(train.init(found.params), found.batch), piper.simulate(train.plan)
    for group in ("g1", "g2"):
        peaks = [report.group(group).memory.peak_bytes for report in (measured, simulated)]
        assert peaks[1] == pytest.approx(peaks[0], rel=0.02)
