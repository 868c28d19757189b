"""What a user reads after a mistake in filters: the whole text."""

from __future__ import annotations

import inspect

import pytest
from expected import Expected
from traced_dags import chain

import piper_jax as piper
from piper_jax import where


def split_chain():
    return chain(2).split(where(), num_microbatches=2)


expected = Expected(__file__)


@expected(
    piper.FilterError,
    """
    place[0] at FILE.py:LINE: where(PP=7, PASS="F") matches nothing.
        PP is 0-1; nearest to 7 is 1
        PASS is F, B
    help: name coordinates that exist.
""",
)
def empty_match_names_what_exists():
    chain(2).place(where(PP=7, PASS="F"), group=0)


@expected(
    piper.FilterError,
    """
    place[1] at FILE.py:LINE: where(PP=(0, 7)): there is no PP=7.
        PP is 0-1
    help: name coordinates that exist.
""",
)
def one_of_several_stages_that_is_none():
    split_chain().place(where(PP=(0, 7)), group=0)


@expected(
    piper.FilterError,
    """
    remat[0] at FILE.py:LINE: where(path="layer.1") matches nothing.
        paths near it: layers.1, layers.0
    help: name coordinates that exist.
""",
)
def a_mistyped_path_is_suggested():
    chain(2).remat(where("layer.1"))


@expected(
    piper.FilterError,
    """
    place[0] at FILE.py:LINE: where(MB=0): there are no microbatches before split.
    help: call plan.split(where(), num_microbatches=...) first, or leave MB out.
""",
)
def microbatches_before_split():
    chain(2).place(where(MB=0), group=0)


@expected(
    piper.FilterError,
    """
    where(PASS='U', MB=...): an update has no MB, it runs once per step for each state.
    help: leave MB out; PASS is F, B, BI or BW with it, and path names the state of an update.
""",
)
def microbatch_of_an_update():
    where(PASS="U", MB=0)


@expected(
    piper.FilterError,
    """
    where(PASS='U', PP=...): an update has no PP, it runs once per step for each state.
    help: leave PP out; PASS is F, B, BI or BW with it, and path names the state of an update.
""",
)
def stage_of_an_update():
    where(PP=0, PASS="U")


@expected(
    piper.FilterError,
    """
    place[0] at FILE.py:LINE: where(PP=1, PASS="BI") matches nothing.
        PP is 0-1
        PASS is F, B
        B has no halves before an order names BI and BW
    help: name coordinates that exist.
""",
)
def half_of_a_backward_that_is_whole():
    chain(2).place(where(PP=1, PASS="BI"), group=0)


@expected(
    piper.FilterError,
    """
    where(PB=...): unknown coordinate 'PB'.
    help: did you mean 'PP'?
""",
)
def unknown_tag():
    where(PB=0)


@expected(
    piper.FilterError,
    """
    where(PASS='W'): unknown pass.
        "F": forward
        "B": backward, whole or both halves of it
        "BI": backward for inputs, once an order names it
        "BW": backward for weights, once an order names it
        "U": update, of parameters and optimizer state, once per step
    help: did you mean 'BW'?
""",
)
def unknown_pass():
    where(PASS="W")


@expected(
    piper.FilterError,
    """
    order[0] at FILE.py:LINE: 'F' is not a filter.
    help: write where(PP=0, PASS='F') or a combination of such.
""",
)
def a_string_is_no_filter():
    chain(2).order(["F"])


@pytest.mark.parametrize("name", expected.cases)
def test_message(name):
    expected.check(name)


def test_the_line_is_that_of_the_call():
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(piper.FilterError) as caught:
        chain(2).place(where(PP=9), group=0)
    assert f"test_filter_errors.py:{line}:" in str(caught.value)
