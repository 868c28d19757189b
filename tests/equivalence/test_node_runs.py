"""A single node of a plan, run alone beside one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from oracle import Problem, momentum, strategy
from seeded_fault import spoil_backward
from tiny_models import Tower, cross_entropy, mean_loss, tokens, weighted_loss
from tolerances import TOLERANCES, assert_close

import piper_jax as piper
from piper_jax import where
from piper_jax.tracing.model_state import model_state

FLOAT32 = TOLERANCES["float32"]


@pytest.fixture(scope="module")
def problem() -> Problem:
    """The head is the embedding, and the embedding is added again before it: shared leaves, shared values."""
    model = Tower(layers=3, tied=True, skip=True, dropout=0.2)
    return Problem(loss_fn=weighted_loss, params=model, batch=tokens(), optimizer=momentum())


@pytest.fixture(scope="module")
def train(problem: Problem) -> piper.Train:
    return problem.parallelize(strategy(stages=3, data=2, microbatches=2, schedule="ZBH1"))


@pytest.mark.parametrize("PASS", ["F", "BI", "BW"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_a_node_gives_is_what_one_device_gives(
    problem: Problem, train: piper.Train, stage: int, PASS: str
) -> None:
    found = train.run_node(f"{PASS}[PP={stage},MB=1]", train.init(problem.params), problem.batch)
    assert (found.node.PASS, found.node.PP, found.node.MB, found.group) == (PASS, stage, 1, f"g{stage}")
    assert found.difference <= 2e-5
    kinds = {a.name.split()[0] for a in found.outputs if "residual" not in a.name}
    expected = {
        "F": {"value"} if stage < 2 else {"total", "extra"},
        "BI": {"cotangent"} if stage else set(),
        "BW": {"gradient"},
    }
    assert kinds == expected[PASS]
    for array in (*found.inputs, *found.outputs):
        compared = array.name.startswith(("value", "cotangent", "gradient", "total", "extra"))
        assert (array.difference is not None) == compared
        assert array.difference is None or array.difference <= 2e-5
        assert np.isfinite(array.norm)


@pytest.mark.parametrize("name", ["F[PP=1,MB=1]", "B[PP=0,MB=1]"])
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_under_zero_parameters_are_gathered_first(problem: Problem, stage: int, name: str) -> None:
    train = problem.parallelize(strategy(stages=2, data=2, microbatches=2, zero_stage=stage))
    found = train.run_node(name, train.init(problem.params), problem.batch)
    assert found.difference <= 2e-5
    gradients = [a for a in found.outputs if a.name.startswith("gradient")]
    assert all(a.difference is not None for a in gradients)
    assert bool(gradients) == name.startswith("B")


def test_gradients_of_all_nodes_add_up_to_those_of_the_step(problem: Problem, train: piper.Train) -> None:
    state = train.init(problem.params)
    leaves = model_state(problem.params)
    sums: dict[str, Any] = {}
    for node in train.plan.dag.nodes:
        if node.PASS == "BW":
            for array in train.run_node(node, state, problem.batch).outputs:
                sums[array.name] = sums.get(array.name, 0) + array.value.sum(0, dtype=np.float64)
    added = [sums[f"gradient {leaves.leaves[i].path}"].astype(np.float32) for i in leaves.trainable]
    assert_close(leaves.trainable_tree(added), train.gradients(state, problem.batch), FLOAT32, "gradient")


def test_a_whole_backward_and_its_table(problem: Problem) -> None:
    plain = dataclasses.replace(problem, loss_fn=mean_loss, params=Tower(layers=2))
    train = plain.parallelize(strategy(stages=2, microbatches=2))
    state = train.init(plain.params)
    found = train.run_node(where(PP=1, MB=0, PASS="B"), state, plain.batch)
    assert found.difference <= 2e-5
    lines = str(found).splitlines()
    assert lines[0].startswith("B[PP=1,MB=0] ")
    assert "on g1, " in lines[0]
    assert [line.split()[0] for line in lines[1:] if not line.startswith("  ")] == ["inputs", "outputs"]
    assert lines[1].split() == ["inputs", "shape", "dtype", "norm", "difference"]
    assert any(line.split()[1:2] == ["residuals"] for line in lines)
    gradient = next(line for line in lines if line.startswith("  gradient head.kernel"))
    assert "[1, 6, 11]" in gradient
    assert "float32" in gradient
    assert found.inputs[0].value.shape == found.inputs[0].shape
    train.step(state, plain.batch)


def test_metrics_of_one_microbatch() -> None:
    """Sums and means are this node's share, rows those of its microbatch; ``last`` is known for the last one alone."""

    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch["x"])
        per_row = jax.nn.logsumexp(logits, axis=-1).mean(-1)
        counts = {"wrong": piper.Sum((logits.argmax(-1) != batch["y"]).sum()), "last": piper.Last(per_row.mean())}
        return cross_entropy(logits, batch["y"]).mean(), {"rows": per_row, **counts}

    problem = Problem(loss_fn=loss, params=Tower(layers=2), batch=tokens(8))
    train = problem.parallelize(strategy(stages=2, microbatches=2))
    for mb in (0, 1):
        found = train.run_node(f"F[PP=1,MB={mb}]", train.init(problem.params), problem.batch)
        differences = {a.name: a.difference for a in found.outputs if a.name.startswith("metric")}
        last = differences.pop("metric last")
        assert (last is None) == (mb == 0)
        assert set(differences) == {"metric rows", "metric wrong"}
        assert all(d is not None and d <= 2e-5 for d in (*differences.values(), last or 0.0))


def test_a_fault_is_in_the_outputs_of_its_node(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: a product in the backward of stage 1 takes one factor twice."""
    plain = Problem(loss_fn=mean_loss, params=Tower(layers=3), batch=tokens(), optimizer=momentum())
    spoil_backward(monkeypatch, plain.params)
    train = plain.parallelize(strategy(stages=3, microbatches=2))
    state = train.init(plain.params)
    found = {
        name: train.run_node(f"{name},MB=0]", state, plain.batch) for name in ("F[PP=1", "B[PP=2", "B[PP=1", "B[PP=0")
    }
    assert [run.difference > 1e-3 for run in found.values()] == [False, False, True, True]
    worst = [max(a.difference or 0.0 for a in found[name].inputs) > 1e-3 for name in ("B[PP=1", "B[PP=0")]
    assert worst == [False, True]


def test_a_wrong_name_compiles_nothing(problem: Problem, train: piper.Train) -> None:
    before = train.compiler.num_compiles
    with pytest.raises(piper.FilterError, match=r"did you mean 'F\[PP=2,MB=0\]'"):
        train.run_node("F[PP=4,MB=0]", train.init(problem.params), problem.batch)
    assert train.compiler.num_compiles == before
