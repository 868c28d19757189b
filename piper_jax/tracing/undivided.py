"""Equations that hold much of a model and stay one: why there are too few units for the stages, and what to write."""

from __future__ import annotations

from typing import Any

from piper_jax import _jax_compat
from piper_jax.tracing.costs import eqn_flops, total_flops
from piper_jax.tracing.flat import inner_jaxprs
from piper_jax.tracing.loss_program import LossProgram

MUCH = 0.1  # of all operations
_MAX_LINES = 3


def undivided(program: LossProgram) -> tuple[str, ...]:
    """A line for each equation that holds at least a tenth of all operations: where it is, and what would divide it."""
    eqns = program.flat.eqns
    total = max(total_flops(eqns), 1)
    holders = [e.eqn for e in eqns if inner_jaxprs(e.eqn.params) and eqn_flops(e.eqn) >= MUCH * total]
    largest = sorted(holders, key=eqn_flops, reverse=True)[:_MAX_LINES]
    return tuple(dict.fromkeys(_line(eqn, eqn_flops(eqn) / total) for eqn in largest))


def _line(eqn: Any, share: float) -> str:
    line = _jax_compat.user_line(eqn)
    what = f"`{_name(eqn)}`{f' at {line}' if line else ''}"
    return f"{what} holds {share:.0%} of the operations and is one unit: {_change(eqn)}."


def _name(eqn: Any) -> str:
    if _is_counted(eqn):
        return "fori_loop"
    name = eqn.primitive.name
    return "checkpoint" if name in _jax_compat.REMAT else name.removesuffix("_call")


def _is_counted(eqn: Any) -> bool:
    """Whether a ``scan`` runs over nothing, which is what a ``fori_loop`` of fixed length becomes."""
    parts = _jax_compat.scan_parts(eqn) if eqn.primitive.name == "scan" else None
    return parts is not None and parts.num_consts + parts.num_carry == len(eqn.invars)


def _change(eqn: Any) -> str:
    name = eqn.primitive.name
    if _is_counted(eqn):
        return 'scan over the stacked parameters, or enter piper.annotate("PP") in its body'
    if name == "scan" or name in _jax_compat.REMAT:
        return 'enter piper.annotate("PP") in its body, around each layer'
    if name == "cond":
        return "choose before the loss function, or by jnp.where in each layer"
    if name == "while":
        return "a loop of fixed length, jax.lax.scan, can be divided"
    return f"put a {_name(eqn)} around each layer, not around several"
