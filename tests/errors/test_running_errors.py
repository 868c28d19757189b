"""What a user reads after what a compiled plan cannot run: the whole text."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from expected import Expected
from small_model import DIM, ROWS, batch, parallelized, params

import piper_jax as piper

expected = Expected(__file__)


@functools.cache
def small() -> piper.Train:
    """One for all, since nothing that is wrong runs."""
    return parallelized(num_microbatches=2)


@expected(
    piper.TraceError,
    """
    init: these parameters are not those of the traced model.
        missing: 3
    help: pass the same pytree (or module) structure that was traced, or trace again.
""",
)
def parameters_of_another_model():
    small().init(params(layers=3))


@expected(
    piper.TraceError,
    """
    init: 0 is float32[5, 5], but float32[4, 4] was traced.
    help: pass parameters of the traced shapes and dtypes, or trace again.
""",
)
def parameters_of_another_shape():
    small().init(params(dim=5))


@expected(
    piper.RuntimeFault,
    """
    step: batch leaf x is int32[16, 4], but float32[16, 4] is expected.
    help: only dimension 0 may differ from the traced batch; cast, or trace again.
""",
)
def batch_leaf_of_another_dtype():
    train = small()
    train.step(train.init(params()), {"x": np.ones((ROWS, DIM), np.int32)})


@expected(
    piper.TraceError,
    """
    step: the batch has another structure than the traced one.
        traced: PyTreeDef({'x': *})
        given:  PyTreeDef((*,))
    help: pass a batch of the traced structure, or trace again.
""",
)
def batch_of_another_structure():
    train = small()
    train.step(train.init(params()), (np.ones((ROWS, DIM), np.float32),))


@expected(
    piper.RuntimeFault,
    """
    step: expected the state that train.init returned, got list.
    help: state = train.init(params); state, metrics = train.step(state, batch)
""",
)
def parameters_in_place_of_the_state():
    small().step(params(), batch())  # type: ignore[arg-type]


@expected(
    piper.RuntimeFault,
    """
    params: expected the state that train.init returned, got NoneType.
    help: state = train.init(params); state, metrics = train.step(state, batch)
""",
)
def nothing_in_place_of_the_state():
    small().params(None)  # type: ignore[arg-type]


@expected(
    piper.TraceError,
    """
    predict: the batch has another structure than the traced one.
        traced: PyTreeDef({'x': *})
        given:  PyTreeDef(*)
    help: pass a batch of the traced structure, or trace again.
""",
)
def batch_of_another_structure_for_predictions():
    train = small()
    train.predict(train.init(params()), np.ones((ROWS, DIM), np.float32))


@expected(
    piper.RuntimeFault,
    """
    step: called inside a JAX transformation.
    help: train.step runs programs on many devices; call it from Python, without jax.jit or grad.
""",
)
def step_inside_jit():
    train = small()
    state = train.init(params())
    jax.jit(lambda b: train.step(state, b))(batch())


@expected(
    piper.RuntimeFault,
    """
    step: batch leaf x is a scalar.
    help: pass arrays [batch, ...], as traced.
""",
)
def scalar_in_place_of_rows():
    train = small()
    train.step(train.init(params()), {"x": 1.0})


@pytest.mark.parametrize("name", expected.cases)
def test_message(name):
    expected.check(name)
