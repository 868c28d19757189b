"""The compiled text: collectives are where the plan has them, and nowhere else."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import optax
import pytest
from carrying_model import Net, regression, rows
from oracle import adamw, momentum, strategy
from tiny_models import Tower, cross_entropy, mean_loss, tokens, weighted_loss

import piper_jax as piper
from piper_jax.ir.nodes import Collective

OPTIMIZED = True
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
OPERATION = re.compile(rf"= [^=]*?\b({'|'.join(KINDS)})(?:-start)?\(([^)]*)\)")


def collectives(text: str) -> Counter[str]:
    """Arrays that collectives work on, by kind. XLA may issue several in one call; each counts.

    An all-to-all on a CPU has an operand for each device.
    """
    found = Counter[str]()
    for kind, operands in OPERATION.findall(text):
        found[kind] += 1 if kind == "all-to-all" else operands.count("%")
    return found


def compiled(train: piper.Train) -> list[tuple[Any, Counter[str]]]:
    """Every instruction of a step that runs a program, with the collectives in its compiled text."""
    return [(i, collectives(i.program.hlo())) for i in train.instructions() if i.program is not None]


def planned(train: piper.Train) -> Counter[str]:
    nodes = train.plan.complete().nodes.values()
    inside = Counter(n.kind.replace("_", "-") for n in nodes if isinstance(n, Collective))
    means = Counter[str]()
    for node in nodes:
        op = train.plan.dag.ops.get(node.id.op)
        if op is not None and node.id.PASS != "BW":
            means["all-reduce"] += op.replica_means[0 if node.id.PASS == "F" else 1]
    return +(inside + means)


def parallelized(loss: Any, model: Any, optimizer: Any, **layout: Any) -> piper.Train:
    return piper.parallelize(loss, model, tokens(), optimizer=optimizer, strategy=strategy(**layout))


@pytest.mark.parametrize(
    ("tied", "layout"),
    [
        (False, {"stages": 1, "data": 4, "microbatches": 2}),
        (False, {"stages": 2, "data": 2, "microbatches": 3, "schedule": "GPipe"}),
        (True, {"stages": 3, "data": 2, "microbatches": 4}),
        pytest.param(True, {"stages": 3, "data": 1, "microbatches": 4}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_text_holds_the_collectives_of_the_plan(tied: bool, layout: dict[str, Any]) -> None:
    train = parallelized(mean_loss, Tower(layers=3, tied=tied), adamw(), **layout)
    programs = compiled(train)
    backward = [found for i, found in programs if i.role == "compute" and any(n.PASS == "B" for n in i.nodes)]
    assert backward
    assert not any(backward)
    assert sum((found for _, found in programs), Counter()) == planned(train)


def test_carried_state_is_reduced_once_per_bucket_and_step() -> None:
    train = piper.parallelize(
        regression, Net(), rows(), optimizer=momentum(), strategy=strategy(stages=2, data=2, microbatches=2)
    )
    carried = [n for n in train.plan.complete().nodes if n.op.startswith("all_reduce carried")]
    assert len(carried) == 2 * len({"float32", "int32"})
    found: Counter[str] = sum((found for _, found in compiled(train)), Counter())
    assert found == planned(train) == {"all-reduce": 4 + len(carried)}


def test_data_parallel_gradients_are_reduced_once_per_bucket_and_step() -> None:
    train = parallelized(mean_loss, Tower(layers=4), momentum(), stages=4, data=2, microbatches=4)
    assert planned(train) == {"all-reduce": len(train.plan.dag.buckets)} == {"all-reduce": 4}


def test_a_tied_bucket_is_reduced_once_over_the_joint_group() -> None:
    train = parallelized(mean_loss, Tower(layers=4, tied=True), momentum(), stages=4, data=2, microbatches=4)
    joint = [(i, found) for i, found in compiled(train) if i.role == "joint"]
    assert [found for _, found in joint] == [{"all-reduce": 1}]
    (shardings, _) = joint[0][0].program.executable.input_shardings
    assert {len(s.device_set) for s in shardings} == {4}


def test_one_device_has_no_collective() -> None:
    train = parallelized(mean_loss, Tower(layers=2), adamw(), microbatches=2)
    assert planned(train) == {}
    assert not any(found for _, found in compiled(train))


def test_pipelines_without_data_parallelism_exchange_scalars_only() -> None:
    train = parallelized(mean_loss, Tower(layers=3), adamw(), stages=3, microbatches=2)
    assert sum((found for _, found in compiled(train)), Counter()) == planned(train) == {"all-gather": 1}


def _normalized(model: Any, batch: Any) -> Any:
    x = model.embed(batch["x"])
    for layer in model.layers:
        with piper.annotate("PP"):
            mean = piper.mean_over_replicas(x.mean((0, 1)))
            x = layer(x - mean)
    return cross_entropy(model.head(x), batch["y"]).mean()


def test_statistics_over_replicas_are_in_the_passes_that_the_plan_says() -> None:
    train = parallelized(_normalized, Tower(layers=2), momentum(), stages=2, data=2, microbatches=2)
    assert sum((found for _, found in compiled(train)), Counter()) == planned(train)


def test_the_weight_of_a_padded_batch_is_summed_once_before_the_step() -> None:
    train = parallelized(weighted_loss, Tower(layers=2), momentum(), stages=2, data=2, microbatches=2)
    programs = compiled(train)
    assert [(str(i.nodes[0]), found) for i, found in programs if i.role == "prologue" and found] == [
        ("F all_reduce weight g1", {"all-reduce": 1})
    ]
    assert sum((found for _, found in programs), Counter()) == planned(train)


def test_values_between_stages_are_of_one_slice() -> None:
    """What is sent is the microbatch of each replica, once, in the dtype that it was computed in."""
    train = parallelized(mean_loss, Tower(layers=2), momentum(), stages=2, data=2, microbatches=3)
    seen = [i for i in train.instructions() if i.role == "transfer"]
    assert len(seen) == 2 * 3
    assert all(len(i.reads) == len(i.writes) == 1 for i in seen)


# -- ZeRO: XLA keeps a reduce-scatter and an all-gather as what they are, on CPU too ----------------------
def zero(
    stage: int, schedule: str = "1F1B", *, stages: int = 2, microbatches: int = 2, **options: Any
) -> piper.Strategy:
    directives = (piper.directive(schedule), piper.directive(f"ZeRO-{stage}", **options))
    return piper.Strategy(
        data_parallel=2, pipeline_parallel=stages, num_microbatches=microbatches, directives=directives
    )


def sharded(model: Any, chosen: piper.Strategy, optimizer: Any = None) -> piper.Train:
    return piper.parallelize(mean_loss, model, tokens(), optimizer=optimizer or momentum(), strategy=chosen)


def adafactor() -> optax.GradientTransformation:
    return optax.adafactor(1e-2, min_dim_size_to_factor=4)


@pytest.mark.parametrize(
    ("tied", "optimizer", "chosen"),
    [
        pytest.param(True, adamw, zero(1, bucket_bytes=10**6), id="ZeRO-1", marks=pytest.mark.full),
        pytest.param(True, adafactor, zero(2, "ZBH1", microbatches=3), id="ZeRO-2", marks=pytest.mark.full),
        pytest.param(True, momentum, zero(3, communication_overlap=True, microbatches=3), id="ZeRO-3"),
        pytest.param(
            False,
            adafactor,
            zero(3, "Interleaved1F1B", gather_distance=0, bucket_bytes=10**6),
            id="ZeRO-3 whole updates",
        ),
        pytest.param(
            False,
            adamw,
            zero(3, "DualPipeV", microbatches=4, bucket_bytes=10**6),
            id="two ways",
            marks=pytest.mark.full,
        ),
    ],
)
def test_zero_has_the_collectives_of_its_plan(tied: bool, optimizer: Any, chosen: piper.Strategy) -> None:
    train = sharded(Tower(layers=4, tied=tied), chosen, optimizer())
    assert sum((found for _, found in compiled(train)), Counter()) == planned(train)


def test_zero_1_reduces_each_gradient_once_per_step() -> None:
    """Two stages of two buckets that share a reduction and a gather each, and a tied bucket over both."""
    train = sharded(Tower(layers=4, tied=True), zero(1, microbatches=4, bucket_bytes=10**6))
    programs = compiled(train)
    assert sum((found for _, found in programs), Counter()) == planned(train) == {"reduce-scatter": 3, "all-gather": 3}
    update = [found for i, found in programs if i.label.startswith("update")]
    assert update == [{"reduce-scatter": 1, "all-gather": 1}] * 2


def test_zero_2_reduces_what_one_group_owns_after_every_microbatch() -> None:
    train = sharded(Tower(layers=4, tied=True), zero(2, microbatches=4, bucket_bytes=10**6))
    assert planned(train) == {"reduce-scatter": 2 * 4 + 1, "all-gather": 3}
    by_role = {role: Counter[str]() for role in ("compute", "joint", "update")}
    for i, found in compiled(train):
        by_role.setdefault(i.role, Counter[str]()).update(found)
    assert by_role["compute"] == {"reduce-scatter": 8}
    assert sum(by_role.values(), Counter()) == planned(train)


def test_zero_3_gathers_once_for_neighbouring_uses() -> None:
    """On one group F and B of a microbatch are neighbours, so that each bundle is gathered once for all of them."""
    train = sharded(Tower(layers=4), zero(3, stages=1, bucket_bytes=10**6))
    assert sum((found for _, found in compiled(train)), Counter()) == planned(train)
    assert planned(train) == {"reduce-scatter": 2, "all-gather": 1}


def test_evaluation_gathers_what_its_forward_passes_read() -> None:
    train = sharded(Tower(layers=4), zero(3, stages=1, bucket_bytes=10**6))
    train.evaluate(train.init(Tower(layers=4)), tokens())
    programs = train._executables.ready("evaluate", len(tokens()["x"])).executor.instructions
    assert sum((collectives(i.program.hlo()) for i in programs if i.program), Counter()) == {"all-gather": 1}
