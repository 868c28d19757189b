"""What a user reads after a mistake in the directive of the tensor axis: the whole text."""

from __future__ import annotations

import pytest
from expected import Expected
from traced_dags import chain, stacked

import piper_jax as piper
from piper_jax import where

expected = Expected(__file__)


@expected(
    piper.DirectiveError,
    """
    shard[0] at FILE.py:LINE: no parameter has a dimension for the tensor axis.
        names of dimensions: none
        rules: mlp
    help: name them (with_partitioning), or give rules={"mlp": "tensor"} or dims={"*.up.kernel": 1}.
""",
)
def names_that_no_parameter_has():
    chain(2).shard(where(), axis="tensor", rules={"mlp": "tensor"})


@expected(
    piper.DirectiveError,
    """
    shard[0] at FILE.py:LINE: dims: no parameter's path matches '*.kernle'.
    help: such as layers.1.kernel, layers.0.kernel.
""",
)
def a_path_of_the_tensor_axis_that_is_none():
    chain(2).shard(where(), axis="tensor", dims={"*.kernle": 1})


@expected(
    piper.DirectiveError,
    """
    shard[0] at FILE.py:LINE: layers.kernel has no dimension 3.
    help: its shape is [2, 32, 32]; '*.kernel' gives 3.
""",
)
def a_dimension_that_a_stack_has_not():
    stacked(2).shard(where(), axis="tensor", dims={"*.kernel": 3})


@expected(
    piper.DirectiveError,
    """
    shard[0] at FILE.py:LINE: dimension 0 of layers.kernel [2, 32, 32] are its layers, which stages divide.
    help: give '*.kernel' another dimension.
""",
)
def the_dimension_of_the_layers_of_a_stack():
    stacked(2).shard(where(), axis="tensor", dims={"*.kernel": 0})


@expected(
    piper.DirectiveError,
    """
    shard: rules='mlp' is no mapping.
    help: such as {"mlp": "tensor"}, or pairs.
""",
)
def rules_that_are_no_mapping():
    chain(2).shard(where(), axis="tensor", rules="mlp")


@pytest.mark.parametrize("name", expected.cases)
def test_message(name):
    expected.check(name)
