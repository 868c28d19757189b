"""Sharding constraints of a model's own, such as sequences divided over the tensor axis between its layers.

A model says ``jax.lax.with_sharding_constraint(x, P(None, "tensor"))``, or Flax's logical form of it, under a mesh.
There is none while a loss is traced, so one with all axes stands in, each of size 1: those of a plan, and the names
that the model gives to dimensions of its parameters. When a program is lowered for the devices of a group, what the
tensor axis divides holds there; the other axes are explicit in a plan and left out.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import linen, nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from piper_jax import _jax_compat
from piper_jax.errors import TraceError
from piper_jax.ir.device_groups import REPLICA_AXES

NAME, TENSOR = "sharding_constraint", "tensor"
AXES = (*REPLICA_AXES, TENSOR)
_MISFIT = re.compile(r"Resource axis|with_sharding_constraint|shardings? specification")
_MESH = re.compile(r"NamedSharding\(mesh=.*?\)\), spec=(P\(.*?\))(, [\w]+=[^)]*)?\)")


def under_a_mesh(call: Callable[[], Any], names: Iterable[str] = ()) -> Any:
    """What ``call`` returns; where it asks for a mesh and has none, it is called under one with all axes.

    Args:
      names: of further axes.

    Raises:
      TraceError: a constraint with an axis that the mesh has not, or more dimensions than its array.
    """
    axes = tuple(dict.fromkeys((*AXES, *names)))
    try:
        try:
            return call()
        except RuntimeError as error:
            if "non-empty mesh" not in str(error):
                raise
        stand_in = AbstractMesh((1,) * len(axes), axes, axis_types=(AxisType.Auto,) * len(axes))
        with jax.sharding.use_abstract_mesh(stand_in):
            return call()
    except Exception as error:
        if isinstance(error, TraceError) or not _MISFIT.search(str(error)):
            raise
        reason = _MESH.sub(r"\1", str(error)).split(". ")[0].splitlines()[0]
        raise TraceError(
            f"trace: a sharding constraint{_place(error)} does not fit.",
            detail=[reason[:300]],
            help=f"name {', '.join(axes)} alone, each once, in one entry for each dimension at most; so must Flax's "
            "rules.",
        ) from None


def constrained(value: Any, sharding: Any, divided: Iterable[str] = ()) -> Any:
    """A value on the mesh of a group, divided over the tensor axis where ``sharding`` says so.

    Args:
      divided: names of dimensions that the tensor axis divides, besides its own.
    """
    mesh, spec, meant = jax.sharding.get_abstract_mesh(), getattr(sharding, "spec", P()), {TENSOR, *divided}
    if mesh.empty or mesh.shape.get(TENSOR, 1) == 1:
        return value
    kept: list[Any] = []
    for part in spec:
        names = {part} if isinstance(part, str) else set(part) if isinstance(part, tuple) else set[Any]()
        kept.append(TENSOR if names & meant and TENSOR not in kept else part if part is P.UNCONSTRAINED else None)
    if TENSOR not in kept:
        return value
    return jax.lax.with_sharding_constraint(value, P(*kept))


def _place(error: Exception) -> str:
    """The innermost line of the user's own that an error went through, and the module that it is of."""
    frames = [(f, n) for f, n in traceback.walk_tb(error.__traceback__) if _jax_compat.is_users(f.f_code.co_filename)]
    if not frames:
        return ""
    frame, line = frames[-1]
    owners = [f.f_locals.get(f.f_code.co_varnames[0]) for f, _ in frames if f.f_code.co_argcount]
    module = _path([m for m in owners if isinstance(m, (linen.Module, nnx.Module))])
    name = frame.f_code.co_filename.rpartition("/")[2]
    return f" at {name}:{line}" + (f", in {module}," if module else "")


def _path(modules: list[Any]) -> str:
    """The path of the last of the modules that a call went through."""
    if not modules:
        return ""
    if isinstance(modules[-1], linen.Module):
        return ".".join(modules[-1].path) or type(modules[-1]).__name__
    first = next(m for m in modules if isinstance(m, nnx.Module))
    found = next((path for path, m in nnx.iter_modules(first) if m is modules[-1]), ())
    return ".".join(map(str, found)) or type(modules[-1]).__name__
