"""A fault to be found: the last product in the backward of ``layers.1`` takes one factor twice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from piper_jax.lowering import tables
from piper_jax.tracing.model_state import model_state


def spoil_backward(monkeypatch: pytest.MonkeyPatch, params: Any) -> None:
    """Plans that are lowered from now on have the fault."""
    sound: Any = tables.passes
    leaves = model_state(params).leaves

    def faulty(program: Any, chunk: Any, *options: Any) -> Any:
        built = sound(program, chunk, *options)
        if not any(leaves[i].path.startswith("layers.1.") for i in chunk.state):
            return built
        back = built.backward
        position = max(i for i, eqn in enumerate(back.eqns) if eqn.name == "mul")
        eqn = back.eqns[position]
        wrong = dataclasses.replace(eqn, inputs=(eqn.inputs[0], eqn.inputs[0]))
        eqns = (*back.eqns[:position], wrong, *back.eqns[position + 1 :])
        return dataclasses.replace(built, backward=dataclasses.replace(back, eqns=eqns))

    monkeypatch.setattr(tables, "passes", faulty)
