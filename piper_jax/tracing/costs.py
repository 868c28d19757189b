"""Floating-point operations of equations, counted on the jaxpr."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

_FREE = frozenset(
    (
        "reshape", "broadcast_in_dim", "transpose", "squeeze", "slice", "dynamic_slice", "dynamic_update_slice",
        "concatenate", "split", "pad", "gather", "scatter", "convert_element_type", "reduce_precision", "copy", "name",
        "stop_gradient", "iota", "select_n", "rev", "random_wrap", "random_unwrap", "bitcast_convert_type", "tile",
        "optimization_barrier", "sharding_constraint", "device_put", "get", "swap",
    )
)  # fmt: skip
_PRODUCTS = frozenset(("dot_general", "ragged_dot_general", "conv_general_dilated"))
_OVER_INPUTS = frozenset(("argmax", "argmin", "reduce"))


def eqn_flops(eqn: Any) -> int:
    """FLOPs of one jaxpr equation: 2 per multiply-add of matrix products and convolutions, 1 per element elsewhere.

    Loops count their trip count (``while``: one trip), ``cond`` its dearest branch; data movement counts nothing.
    Ragged products count every row once, whichever group it falls to; convolutions count no padding and no holes.
    """
    name = eqn.primitive.name
    if name in _FREE:
        return 0
    if rule := _RULES.get(name):
        return rule(eqn)
    if name.startswith("reduce_window"):
        return _elements(eqn.outvars) * math.prod(eqn.params["window_dimensions"])
    if name.startswith("reduce_") or name in _OVER_INPUTS:
        return _elements(eqn.invars)
    if name.startswith("scatter"):
        return _elements(eqn.invars[2:])
    inner = _inner(eqn)
    return sum(map(jaxpr_flops, inner)) if inner else _elements(eqn.outvars)


def jaxpr_flops(jaxpr: Any) -> int:
    """FLOPs of a whole jaxpr."""
    return sum(eqn_flops(eqn) for eqn in jaxpr.eqns)


def product_flops(eqn: Any) -> int:
    """FLOPs of an equation that is or holds a matrix product or a convolution; 0 of others."""
    name = eqn.primitive.name
    holds = name in _PRODUCTS or any(product_flops(e) for jaxpr in _inner(eqn) for e in jaxpr.eqns)
    return eqn_flops(eqn) if holds else 0


def _inner(eqn: Any) -> list[Any]:
    found = [getattr(p, "jaxpr", p) for p in eqn.params.values()]
    return [jaxpr for jaxpr in found if hasattr(jaxpr, "eqns")]


def total_flops(eqns: Iterable[Any]) -> int:
    """FLOPs of flat equations."""
    return sum(eqn_flops(e.eqn) for e in eqns)


def _elements(variables: Iterable[Any]) -> int:
    return sum(math.prod(v.aval.shape) for v in variables if hasattr(v.aval, "shape"))


def _dot(eqn: Any) -> int:
    (contract, _), _ = eqn.params["dimension_numbers"]
    return 2 * _elements(eqn.outvars) * math.prod(eqn.invars[0].aval.shape[d] for d in contract)


def _ragged_dot(eqn: Any) -> int:
    """Each row of the left meets the right of its own group alone, whichever dimension is divided into groups."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contract), (_, batch) = numbers.dot_dimension_numbers
    shared = {*contract, *batch, *numbers.rhs_group_dimensions}
    left, right = (eqn.invars[k].aval.shape for k in (0, 1))
    return 2 * math.prod(left) * math.prod(size for d, size in enumerate(right) if d not in shared)


def _convolution(eqn: Any) -> int:
    """Two for each element of the result, input feature and position of the window that lies on an input element."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    left, right, out = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    dimensions = zip(
        numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], params["window_strides"], params["padding"],
        params["lhs_dilation"], params["rhs_dilation"], strict=True,
    )  # fmt: skip
    touched = math.prod(
        _touching(out[o], right[r], left[i], stride, padding[0], holes, step)
        for i, r, o, stride, padding, holes, step in dimensions
    )
    return 2 * out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * right[numbers.rhs_spec[1]] * touched


def _touching(results: int, window: int, inputs: int, stride: int, low: int, holes: int, step: int) -> int:
    """Pairs of a result and a window position along one dimension that meet at an input, not at padding or a hole."""
    outer, inner = sorted(((results, stride), (window, step)))
    places = np.arange(inner[0]) * inner[1] - low
    found = 0
    for k in range(outer[0]):
        at = places + k * outer[1]
        found += int(np.count_nonzero((at >= 0) & (at < inputs * holes) & (at % holes == 0)))
    return found


def _sort(eqn: Any) -> int:
    """Comparisons of the first operand, n log n."""
    shape = eqn.invars[0].aval.shape
    return math.prod(shape) * _log2(shape[eqn.params["dimension"]])


def _fft(eqn: Any) -> int:
    """5 n log n of a complex transform, half of it for a real one (Cooley and Tukey)."""
    size = math.prod(eqn.params["fft_lengths"])
    arrays = max(math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars))
    is_real = any(v.aval.dtype.kind == "f" for v in (*eqn.invars, *eqn.outvars))
    return 5 * arrays * _log2(size) // (2 if is_real else 1)


def _triangular_solve(eqn: Any) -> int:
    return math.prod(eqn.invars[1].aval.shape) * eqn.invars[0].aval.shape[-1]


def _factorization(numerator: int, denominator: int) -> Callable[[Any], int]:
    """A share of m n min(m, n) (Golub and Van Loan, Matrix Computations)."""

    def flops(eqn: Any) -> int:
        shape = eqn.invars[0].aval.shape
        return numerator * math.prod(shape) * min(shape[-2:]) // denominator

    return flops


def _kernel(eqn: Any) -> int:
    """A Pallas kernel runs at each point of its grid; a size known only at run time counts once."""
    grid = eqn.params["grid_mapping"].grid
    return math.prod(n for n in grid if isinstance(n, int)) * jaxpr_flops(eqn.params["jaxpr"])


def _log2(size: int) -> int:
    return math.ceil(math.log2(max(size, 1)))


_RULES: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "scan": lambda eqn: eqn.params["length"] * jaxpr_flops(eqn.params["jaxpr"].jaxpr),
    "cond": lambda eqn: max(jaxpr_flops(branch.jaxpr) for branch in eqn.params["branches"]),
    "pallas_call": _kernel,
    "sort": _sort,
    "top_k": lambda eqn: _elements(eqn.invars) * _log2(2 * eqn.params["k"]),
    "select_and_scatter_add": lambda eqn: _elements(eqn.invars[:1]) * math.prod(eqn.params["window_dimensions"]),
    "fft": _fft,
    "triangular_solve": _triangular_solve,
    "cholesky": _factorization(1, 3),
    "lu": _factorization(2, 3),
    "geqrf": _factorization(4, 3),
    "householder_product": _factorization(4, 3),
    "eigh": _factorization(9, 1),
}
