"""Sharding constraints of a model's own, such as sequences divided over the tensor axis between its layers.

A model says ``jax.lax.with_sharding_constraint(x, P(None, "tensor"))``, or Flax's logical form of it, under a mesh.
There is none while a loss is traced, so one with all axes stands in, each of size 1. When the program is lowered for
the devices of a group, the tensor axis of a constraint holds there; the others are explicit in a plan and left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from piper_jax.errors import TraceError
from piper_jax.ir.device_groups import REPLICA_AXES

NAME, TENSOR = "sharding_constraint", "tensor"
AXES = (*REPLICA_AXES, TENSOR)


def under_a_mesh(call: Callable[[], Any]) -> Any:
    """What ``call`` returns; where it asks for a mesh and has none, it is called under one with all axes."""
    try:
        return call()
    except RuntimeError as error:
        if "non-empty mesh" not in str(error):
            raise
    stand_in = AbstractMesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    try:
        with jax.sharding.use_abstract_mesh(stand_in):
            return call()
    except ValueError as error:
        if "mesh" not in str(error):
            raise
        raise TraceError(
            f"trace: a sharding constraint does not fit: {str(error).splitlines()[0][:200]}",
            help=f"name the axes {', '.join(AXES)} alone, one entry for each dimension at most; unbox Linen's metadata "
            "before the loss (flax.core.meta.unbox) and divide its parameters by path.",
        ) from None


def constrained(value: Any, sharding: Any) -> Any:
    """A value on the mesh of a group, divided over the tensor axis where ``sharding`` says so."""
    mesh, spec = jax.sharding.get_abstract_mesh(), getattr(sharding, "spec", P())
    if mesh.empty or mesh.shape.get(TENSOR, 1) == 1:
        return value
    kept = [TENSOR if part == TENSOR or (isinstance(part, tuple) and TENSOR in part) else None for part in spec]
    if TENSOR not in kept:
        return value
    return jax.lax.with_sharding_constraint(value, P(*kept))
