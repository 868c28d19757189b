"""What is traced, compiled and run, given values of many types: no error of Python's own comes out of piper's code."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from small_model import batch, loss, params
from wrong import VALUES, raw_errors

import piper_jax as piper

FEW = (None, 3, 2.5, "x", [None], {}, object())
TEXT = np.array(["a"])
FUNCTIONS = (lambda: 0, lambda a, b, c, d: 0, piper.directive("1F1B"))


def traced(loss_fn=loss, **changed):
    return piper.trace(loss_fn, **{"params": params(), "batch": batch(), "optimizer": optax.sgd(0.1), **changed})


def weighted(**parts):
    return lambda k, b: piper.WeightedLoss(**{"total": loss(k, b), "weight": 1.0, **parts})


PLAN = traced().apply(piper.Strategy())
CALLS = {
    "loss_fn": (lambda x: traced(x), (*(v for v in VALUES if not callable(v)), *FUNCTIONS)),
    "params": (lambda x: traced(params=x), (None, 3, "x", [None], {}, object(), TEXT)),
    "batch": (lambda x: traced(batch=x), (*FEW, {"x": TEXT})),
    "optimizer": (lambda x: traced(optimizer=x), FEW),
    "wrt": (lambda x: traced(wrt=x), FEW),
    "forward_only": (lambda x: traced(forward_only=x), FEW),
    "what the loss is": (lambda x: traced(lambda k, b: x), FEW),
    "total": (lambda x: traced(weighted(total=x)), FEW),
    "weight": (lambda x: traced(weighted(weight=x)), FEW),
    "auxiliary": (lambda x: traced(lambda k, b: (loss(k, b), x)), FEW),
    "bind": (lambda x: PLAN.bind(x, params(), batch()), FEW),
    "compile plan": (lambda x: piper.compile(x), FEW),
    "compile devices": (lambda x: piper.compile(PLAN, x), [v for v in FEW if v is not None]),
    "strategy": (lambda x: piper.parallelize(loss, params(), batch(), strategy=x), FEW[1:]),
    "region tag": (lambda x: piper.annotate(x), VALUES),
    "region": (lambda x: piper.annotate("PP")(x), [v for v in VALUES if not callable(v)]),
    "degree": (lambda x: piper.annotate(data_parallel=x), VALUES),
    "class with degrees": (lambda x: piper.annotate(data_parallel=2)(x), [v for v in VALUES if v is not int]),
    "experts": (lambda x: piper.expert_region(x), VALUES),
    "expert_dim": (lambda x: piper.expert_region(jax.nn.gelu, x), VALUES),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_error_of_python_comes_out(name, lowered):
    call, values = CALLS[name]
    assert raw_errors(call, values) == []
    assert not lowered
