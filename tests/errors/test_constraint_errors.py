"""What a user reads whose names of dimensions, or constraints on them, do not fit: the whole text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expected import Expected
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P
from small_model import DIM, ROWS, apply, batch, loss, params

import piper_jax as piper

expected = Expected(__file__)


@expected(
    piper.TraceError,
    """
    trace: w has 2 dimensions [4, 4], its partitioning names 3: ('embed', 'mlp', 'heads').
    help: give one name (or None) for each dimension where the parameter is made.
""",
)
def names_of_another_rank():
    boxed = nn.Partitioned(jnp.ones((DIM, DIM)), names=("embed", "mlp", "heads"))
    piper.trace(lambda p, b: (b["x"] @ p["w"].value).mean(), {"w": boxed}, {"x": np.ones((ROWS, DIM), np.float32)})


class Constrained(nnx.Module):
    """A layer inside a layer, whose constraint is given."""

    def __init__(self, spec: Any, depth: int = 1):
        self.inner = Constrained(spec, 0) if depth else nnx.Linear(DIM, DIM, rngs=nnx.Rngs(0))
        self.spec = P(None, "tensor") if depth else spec

    def __call__(self, x: Any) -> Any:
        return jax.lax.with_sharding_constraint(self.inner(x), self.spec)


@expected(
    piper.TraceError,
    """
    trace: a sharding constraint at FILE.py:LINE, in inner, does not fit.
        Resource axis: tensr of P('tensr',) is not found in mesh: ('data', 'expert', 'tensor').
    help: name data, expert, tensor alone, each once, in one entry for each dimension at most; so must Flax's rules.
""",
)
def constraint_with_an_axis_that_is_not():
    piper.trace(lambda model, batch: model(batch["x"]).mean(), Constrained(P("tensr")), batch())


def test_constraints_of_other_ranks_and_axes_named_twice() -> None:
    for spec, fault in ((P(None, None, "tensor"), "rank at least 3"), (P("data", "data"), "duplicate entries")):
        with pytest.raises(piper.TraceError, match=fault) as caught:
            piper.trace(lambda model, batch: model(batch["x"]).mean(), Constrained(spec), batch())
        assert "test_constraint_errors.py" in str(caught.value)


@expected(
    piper.AnnotationError,
    """
    annotate("PP") inside another PP region, at dot_general.
    help: annotate either the layer class or the block around its call, not both.
""",
)
def region_inside_a_region():
    def nested(kernels: Any, batch: Any) -> Any:
        with piper.annotate("PP"):
            return apply(kernels, batch).mean()

    piper.trace(nested, params(), batch())


@expected(
    piper.TraceError,
    """
    trace: the parameters (list) hold no floating-point array to train.
    help: pass a pytree of arrays, or an nnx.Module with nnx.Param variables (or wrt=...).
""",
)
def no_parameters():
    piper.trace(loss, [1, 2], batch())


@expected(
    piper.AnnotationError,
    """
    annotate('PPP'): unknown region tag
    help: did you mean 'PP'?
""",
)
def unknown_tag():
    piper.annotate("PPP")


@pytest.mark.parametrize("name", expected.cases)
def test_message(name: str, lowered: list[str]) -> None:
    expected.check(name)
    assert not lowered
