"""Which optimizers are evaluated on flat shards, found from their equations alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import piper_jax as piper
from piper_jax import where
from piper_jax.ir.nodes import Collective
from piper_jax.tracing.model_state import model_state
from piper_jax.tracing.optimizer_program import OptimizerProgram, trace_optimizer

PARAMS = {
    "bias": jnp.zeros(6),
    "kernel": jnp.zeros((6, 8)),
    "one": jnp.zeros(1),
    "scale": jnp.zeros(()),
    "wide": jnp.zeros((8, 6)),
}
NAMES = sorted(PARAMS)
ALL = frozenset(NAMES)
MATRICES = frozenset({"kernel", "wide"})
SINGLE = frozenset({"one", "scale"})


def program(optimizer: Any, buckets: tuple[int, ...] = (0, 1, 2, 3, 4)) -> OptimizerProgram:
    """The optimizer over ``PARAMS``, each leaf in its own bucket unless said otherwise."""
    return trace_optimizer(optimizer, model_state(PARAMS), buckets)


def elementwise(optimizer: Any) -> frozenset[str]:
    return frozenset(NAMES[bucket] for bucket in program(optimizer).elementwise.buckets)


def masked(tree: Any) -> Any:
    return jax.tree.map(lambda v: v.ndim > 1, tree)


def labels(tree: Any) -> Any:
    return jax.tree.map(lambda v: "frozen" if v.ndim > 1 else "trained", tree)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1, momentum=0.9, nesterov=True),
        optax.adamw(1e-2),
        optax.amsgrad(1e-2),
        optax.adamax(1e-2),
        optax.lion(1e-3),
        optax.rmsprop(1e-2, centered=True),
        optax.rprop(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 10))),
        optax.chain(optax.scale_by_adam(), optax.masked(optax.add_decayed_weights(0.1), masked)),
        optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optax.adam(1e-2)}, labels),
        optax.MultiSteps(optax.adam(1e-2), 2),
        optax.apply_if_finite(optax.adam(1e-2), 3),
        optax.chain(optax.clip(1.0), optax.sgd(0.1)),
        optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
        optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    ],
)
def test_updated_element_by_element(optimizer: Any) -> None:
    assert elementwise(optimizer) == ALL


@pytest.mark.parametrize(
    ("optimizer", "whole"),
    [
        (optax.scale_by_factored_rms(min_dim_size_to_factor=4), MATRICES),
        (contrib.muon(1e-2), MATRICES),
        (optax.chain(optax.centralize(), optax.sgd(0.1)), MATRICES),
        (optax.adafactor(1e-2, min_dim_size_to_factor=4), ALL - SINGLE),
        (optax.lamb(1e-2), ALL - SINGLE),
        (optax.chain(optax.zero_nans(), optax.sgd(0.1)), ALL),
        (optax.novograd(1e-2), ALL - SINGLE),
        (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), ALL - SINGLE),
        (optax.chain(optax.masked(optax.centralize(), {n: n == "wide" for n in NAMES}), optax.sgd(0.1)), {"wide"}),
    ],
)
def test_needs_whole_leaves(optimizer: Any, whole: frozenset[str]) -> None:
    """Row sums, matrix products, norms that scale their own leaf, a reduction that is kept as state."""
    assert whole <= ALL - elementwise(optimizer)
    assert elementwise(optimizer) >= ALL - whole - SINGLE


def test_a_bucket_is_whole_if_one_of_its_leaves_is() -> None:
    centralized = optax.chain(optax.masked(optax.centralize(), {n: n == "wide" for n in NAMES}), optax.sgd(0.1))
    assert program(centralized, (0, 1, 0, 0, 1)).elementwise.buckets == {0}


@pytest.mark.parametrize(
    ("optimizer", "combined"),
    [
        (optax.clip_by_global_norm(1.0), {"sum"}),
        (optax.apply_if_finite(optax.sgd(0.1), 3), {"and"}),
        (optax.sgd(0.1), set()),
    ],
)
def test_how_parts_of_an_exchanged_value_are_put_together(optimizer: Any, combined: set[str]) -> None:
    found = program(optax.chain(optimizer, optax.sgd(0.1)))
    exchanged = {value for values in found.exchanged for value in values}
    assert {found.elementwise.combine[v] for v in exchanged if found.flat.avals[v].size == 1} - {"or"} >= combined
    assert exchanged <= set(found.elementwise.combine)


def two_stages(params: Any, batch: Any) -> Any:
    with piper.annotate("PP"):
        x = jnp.tanh(batch @ params["kernel"])
    with piper.annotate("PP"):
        return jnp.mean((x + params["bias"]) ** 2)


KERNEL_AND_BIAS = {"kernel": np.ones((6, 8), np.float32), "bias": np.zeros(8, np.float32)}
ROWS = np.ones((8, 6), np.float32)


def traced(optimizer: Any, params: Any = KERNEL_AND_BIAS) -> piper.Plan:
    return piper.trace(two_stages, params, ROWS, optimizer=optimizer)


@pytest.mark.parametrize(
    ("saved", "given", "differs"),
    [
        (optax.adamw(1e-2), optax.lamb(1e-2), ["  saved: bias: element by element", "  given: bias: whole"]),
        (optax.clip(1.0), optax.clip_by_global_norm(1.0), ["  saved: none", "  given: round 0: exchanges 8 bytes"]),
        (optax.sgd(0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16), ["bfloat16"]),
    ],
)
def test_a_plan_is_bound_to_no_optimizer_that_it_was_not_made_for(saved: Any, given: Any, differs: list[str]) -> None:
    """Their states have the same names."""
    plan, other = traced(saved), traced(given)
    assert plan.source.optimizer.leaf_paths == other.source.optimizer.leaf_paths
    with pytest.raises(piper.PlanError, match="made for another program") as caught:
        plan.bind(two_stages, KERNEL_AND_BIAS, ROWS, optimizer=given)
    for line in differs:
        assert line in "\n".join(caught.value.detail)


def test_a_plan_is_bound_to_an_optimizer_of_other_numbers() -> None:
    assert traced(optax.adamw(1e-2)).bind(two_stages, KERNEL_AND_BIAS, ROWS, optimizer=optax.adamw(3e-4))


def test_state_of_no_one_bucket_is_counted_whole(tmp_path: Any) -> None:
    """Two moments of 56 numbers on every group; of sgd, adam and their step counts nothing."""
    assert [traced(o).dag.common_optimizer_bytes for o in (optax.sgd(0.1, momentum=0.9), optax.adam(0.1))] == [0, 0]
    plan = traced(optax.flatten(optax.adam(0.1))).apply(piper.Strategy(data_parallel=2, zero_stage=1))
    plan.save(tmp_path / "plan.json")
    for known in (plan, piper.load_plan(tmp_path / "plan.json")):
        assert "optimizer state of no one bucket, kept whole on every group: 448 bytes" in str(known)
        assert piper.simulate(known).groups[0].memory.peak.optimizer == 448


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipe"])
def test_parameters_that_nothing_reads_are_never_gathered(schedule: str) -> None:
    """Whether one group holds them or two."""
    leaf = np.ones((9, 9), np.float32)
    strategy = piper.Strategy(
        data_parallel=2, pipeline_parallel=2, num_microbatches=4, zero_stage=3, directives=(piper.directive(schedule),)
    )
    plan = traced(optax.adam(0.1), {**KERNEL_AND_BIAS, "another": leaf, "unread": leaf}).apply(strategy).check()
    unread = [b for b in plan.dag.buckets.values() if b.unread]
    assert [[leaf.path for leaf in bucket.leaves] for bucket in unread] == [["another", "unread"]]
    gathered = {v for n in plan.complete().nodes.values() if isinstance(n, Collective) for v in n.values}
    assert "parameters kernel" in gathered
    assert not any(value.endswith(unread[0].name) for value in gathered)


def test_the_plan_says_which_state_is_updated_whole(tmp_path: Any) -> None:
    plan = traced(optax.scale_by_factored_rms(min_dim_size_to_factor=4))
    flags = {leaf.path: b.elementwise for b in plan.dag.buckets.values() for leaf in b.leaves}
    assert flags == {"kernel": False, "bias": True}
    plan.save(tmp_path / "plan.json")
    loaded = piper.load_plan(tmp_path / "plan.json")
    assert loaded.dag.buckets == plan.dag.buckets
    sharded = [p.place(where(), group=(0, 1)).replicate(where(), shard_optimizer=True) for p in (plan, loaded)]
    assert sharded[0].complete() == sharded[1].complete()
    assert "B all_gather gradient kernel" in map(str, sharded[0].complete().nodes)
