"""What a user reads whose regions cannot be stages: the whole text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from expected import Expected
from flax import nnx
from small_model import apply, batch, params

import piper_jax as piper
from piper_jax.tracing.model_state import model_state

expected = Expected(__file__)


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: the model has 4 units, too few for 6 stages.
        annotate("PP") around FILE.py:LINE is no unit: nothing in it depends on the parameters; its readers compute it.
        annotate("PP") around FILE.py:LINE is no unit: nothing in it depends on the batch; its readers compute it.
    help: use 1 to 4 stages, or annotate more regions.
""",
)
def regions_that_are_no_units():
    def scaled(kernels: Any, rows: Any) -> Any:
        with piper.annotate("PP"):
            x = rows["x"] / 255
        with piper.annotate("PP"):
            decay = jnp.sum(kernels[0] ** 2)
        return apply(kernels, {"x": x}).mean() + decay

    plan = piper.trace(scaled, params(), batch())
    assert str(plan).count("is no unit") == 2
    plan.cut(stages=6)


@expected(
    piper.DirectiveError,
    """
    cut[0] at FILE.py:LINE: the model has 2 units, too few for 4 stages.
        `fori_loop` at FILE.py:LINE holds 97% of the operations and is one unit: scan over the stacked parameters, or enter piper.annotate("PP") in its body.
    help: use 1 to 2 stages, or annotate more regions.
""",  # noqa: E501
)
def a_model_in_one_loop():
    def looped(kernels: Any, rows: Any) -> Any:
        return jax.lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ kernels[i]), rows["x"]).mean()

    plan = piper.trace(looped, jnp.ones((4, 4, 4)), batch())
    assert "`fori_loop`" not in str(plan)
    assert "`fori_loop`" in str(plan.cut(stages=2))
    plan.cut(stages=4)


@expected(
    piper.TraceError,
    """
    trace: wrt=('a.*', 'lora'): no parameter has 'lora'.
    help: such as a.lora_b, a.lora_a.
""",
)
def trained_leaves_of_a_path_that_does_not_exist():
    model_state({"a": dict.fromkeys(("kernel", "lora_a", "lora_b"), 1.0)}, ("a.*", "lora"))


@expected(
    piper.TraceError,
    """
    trace: wrt={'a': True} is no path, nor a tree of booleans like the parameters.
    help: such as wrt="*.lora_a", wrt=("adapters", "head.bias"), or a tree of booleans with the keys of the parameters.
""",
)
def trained_leaves_of_another_tree():
    model_state({"a": 1.0, "b": 2.0}, {"a": True})


@expected(
    piper.TraceError,
    """
    trace: wrt='steps' chooses no floating-point array of the dict.
    help: such as wrt="*.lora_a", wrt=("adapters", "head.bias"), or a tree of booleans with the keys of the parameters.
""",
)
def nothing_to_train_in_what_is_chosen():
    model_state({"a": 1.0, "steps": 2}, "steps")


@expected(
    piper.TraceError,
    """
    trace: wrt=LoRAParam chooses no floating-point array of the Linear.
    help: such as wrt=nnx.LoRAParam for modules with such variables; without wrt all parameters are trained.
""",
)
def a_filter_of_variables_that_matches_nothing():
    model_state(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), nnx.LoRAParam)


@pytest.mark.parametrize("name", expected.cases)
def test_message(name: str, lowered: list[str]) -> None:
    expected.check(name)
    assert not lowered
