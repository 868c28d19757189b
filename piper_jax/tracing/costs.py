"""Floating-point operations of equations, counted on the jaxpr."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

_FREE = frozenset(
    (
        "reshape", "broadcast_in_dim", "transpose", "squeeze", "slice", "dynamic_slice", "dynamic_update_slice",
        "concatenate", "pad", "gather", "convert_element_type", "copy", "stop_gradient", "iota", "select_n", "rev",
        "random_wrap", "random_unwrap", "bitcast_convert_type",
    )
)  # fmt: skip


def eqn_flops(eqn: Any) -> int:
    """FLOPs of one jaxpr equation: 2 per multiply-add of matrix products and convolutions, 1 per element elsewhere.

    Loops count their trip count (``while``: one trip), ``cond`` its dearest branch; data movement counts nothing.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in _FREE:
        return 0
    out_size = sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape"))
    if name == "dot_general":
        (contract, _), _ = params["dimension_numbers"]
        return 2 * out_size * math.prod(eqn.invars[0].aval.shape[d] for d in contract)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2 * out_size * math.prod(kernel) // max(out_features, 1)
    if name == "scan":
        return params["length"] * jaxpr_flops(params["jaxpr"].jaxpr)
    if name == "cond":
        return max(jaxpr_flops(branch.jaxpr) for branch in params["branches"])
    if inner := [getattr(p, "jaxpr", p) for p in params.values() if hasattr(getattr(p, "jaxpr", p), "eqns")]:
        return sum(jaxpr_flops(jaxpr) for jaxpr in inner)
    if name.startswith("reduce_") or name in ("argmax", "argmin", "cumsum", "sort"):
        return sum(math.prod(v.aval.shape) for v in eqn.invars if hasattr(v.aval, "shape"))
    return out_size


def jaxpr_flops(jaxpr: Any) -> int:
    """FLOPs of a whole jaxpr."""
    return sum(eqn_flops(eqn) for eqn in jaxpr.eqns)


def total_flops(eqns: Iterable[Any]) -> int:
    """FLOPs of flat equations."""
    return sum(eqn_flops(e.eqn) for e in eqns)
