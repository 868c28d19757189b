"""What a user reads after a mistake in the stages that are listed by path: the whole text."""

from __future__ import annotations

import pytest
from expected import Expected
from traced_dags import chain, op, traced

import piper_jax as piper

expected = Expected(__file__)


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: stages[0]='layers.0, layer.1': no unit has 'layer.1'.
    help: such as layers.1, layers.3, layers.2.
""",
)
def stages_of_a_path_that_does_not_exist():
    chain(4).cut(stages=["layers.0, layer.1", "layers.2-3"])


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: unit 2 (layers.2) is in no stage.
    help: list every unit in one stage; print(plan) shows them.
""",
)
def stages_that_leave_a_unit_out():
    chain(4).cut(stages=["layers.0-1", "layers.3"])


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: stages[0] has layers.1, but stages[1] has layers.0, which comes before it in the model.
    help: list stages in the order of the model, each of neighbouring units; print(plan) shows them.
""",
)
def stages_by_path_out_of_order():
    chain(4).cut(stages=["layers.1, layers.3", "layers.0, layers.2"])


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: stages[1]='params.layers.3-1': layers.3-1 runs backwards.
    help: write layers.1-3.
""",
)
def stages_with_a_range_that_runs_backwards():
    chain(4).cut(stages=["layers.0", "params.layers.3-1"])


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: stages[1]=' , ' names no unit.
    help: name modules, such as layers.0, layers.1; or leave the stage out.
""",
)
def a_stage_without_a_path():
    chain(2).cut(stages=["layers.0-1", " , "])


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: stages[1]='embed' has no unit that is in no stage before it.
    help: name another module in it, or leave the stage out; print(plan) shows the units.
""",
)
def a_stage_of_tied_parameters_alone():
    ops = [op("embed", 0, reads=("table",)), op("embed#2", 1, reads=("table",))]
    traced(ops, [("embed", "embed#2", "x")]).cut(stages=["embed*", "embed"])


@expected(
    piper.DirectiveError,
    """
    Strategy at FILE.py:LINE: cut[0] at FILE.py:LINE: stages is empty.
    help: list the units of each stage, or leave stages out.
""",
)
def no_stages_at_all():
    chain(2).apply(piper.Strategy(stages=()))


@expected(
    piper.DirectiveError,
    """
    Strategy at FILE.py:LINE: stages lists 2, but 1F1B has 1.
    help: list 1 stage, or leave stages out.
""",
)
def stages_of_another_number_than_the_schedules():
    chain(4).apply(piper.Strategy(stages=("layers.0", "layers.1-3")))


@pytest.mark.parametrize("name", expected.cases)
def test_message(name):
    expected.check(name)
