"""What a user reads after loading a file that is no plan any more, or binding another program: the whole text."""

from __future__ import annotations

import json

import pytest
from expected import Expected
from traced_dags import chain

import piper_jax as piper
from piper_jax import Strategy
from piper_jax.planning import plan_from_json, plan_json
from piper_jax.planning.structure import differences

expected = Expected(__file__)


def loaded(change):
    """The plan of two stages from its file, after ``change`` of the data of its DAG."""
    data = json.loads(plan_json(chain(2).apply(Strategy(pipeline_parallel=2, num_microbatches=2))))
    change(data["dag"])
    return plan_from_json(json.dumps(data), "plan.json")


@expected(
    piper.PlanError,
    """
    plan.json is damaged: known-names: F[PP=1,MB=0] layers.1 computes an operation that the plan does not have.
    help: use a traced plan.
""",
)
def an_operation_is_missing():
    loaded(lambda dag: dag["ops"].pop())


@expected(
    piper.PlanError,
    """
    plan.json is damaged: ops[1]: layers.0 is there twice.
    help: save the plan again.
""",
)
def an_operation_is_listed_twice():
    loaded(lambda dag: dag["ops"].insert(0, dag["ops"][0]))


@expected(
    piper.PlanError,
    """
    plan.json is damaged: ops[0].flops_forward=-5 is not a number from 0.
    help: save the plan again.
""",
)
def a_negative_cost():
    loaded(lambda dag: dag["ops"][0].update(flops_forward=-5))


@expected(
    piper.PlanError,
    """
    plan.json is damaged: placed-once: [PP=0,MB=2] layers.0 has the passes none.
    help: each microbatch needs F, and B or both BI and BW, once.
""",
)
def a_number_of_microbatches_that_the_nodes_do_not_have():
    loaded(lambda dag: dag.update(num_microbatches=3))


@expected(
    piper.PlanError,
    """
    plan.json is damaged: ops[0]: there is no 'flops_forwards'.
    help: did you mean 'flops_forward'?
""",
)
def an_unknown_field():
    loaded(lambda dag: dag["ops"][0].update(flops_forwards=5))


@expected(
    piper.PlanError,
    """
    plan.json is damaged: data[0][1]=99 is not a number from 0 to 9.
    help: save the plan again.
""",
)
def an_edge_to_nowhere():
    loaded(lambda dag: dag["data"][0].__setitem__(1, 99))


@expected(
    piper.PlanError,
    """
    plan is nested too deeply to be one that plan.save wrote.
    help: load a file that plan.save wrote.
""",
)
def a_file_of_brackets():
    plan_from_json("[" * 100_000)


@pytest.mark.parametrize("name", expected.cases)
def test_message(name):
    expected.check(name)


def test_filters_that_are_nested_too_deeply_are_refused():
    text = plan_json(chain(1).place(piper.where(), group=0))
    filter = '{"where":{}}'
    assert filter in text
    with pytest.raises(piper.PlanError, match="a filter of more than 300 operators, one inside another"):
        plan_from_json(text.replace(filter, '{"not":' * 301 + filter + "}" * 301))


SAVED = {
    "parameter": ("0: float32(4, 4) trainable", "1: float32(4, 4) trainable"),
    "operation": ("0: dot_general(2, 0) -> float32[16,4]", "0: tanh(3) -> float32[16,4]"),
    "optimizer state": ("count", "mu.0"),
}


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({}, []),
        (
            {"parameter": (SAVED["parameter"][0], "1: float32(4, 8) trainable")},
            ["parameter 1 of 2", "  saved: 1: float32(4, 4) trainable", "  given: 1: float32(4, 8) trainable"],
        ),
        (
            {"operation": SAVED["operation"][:1], "optimizer state": ()},
            [
                *("operation 1 of 1, 2 when saved", "  saved: 0: tanh(3) -> float32[16,4]", "  given: none"),
                *("optimizer state 0 of 0, 2 when saved", "  saved: count", "  given: none"),
            ],
        ),
    ],
)
def test_the_first_difference_of_each_kind_is_shown(change, lines):
    assert list(differences(SAVED, {**SAVED, **change})) == lines
    assert list(differences({}, SAVED)) == ["the file does not say what it looked like"]
