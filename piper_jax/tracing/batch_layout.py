"""The batch pytree as array leaves in order, whose dimension 0 is the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from piper_jax.errors import TraceError
from piper_jax.tracing.model_state import is_array, path_text, spec


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """The batch pytree: array leaves in order, their dimension 0 being the batch (scalars are shared by all slices)."""

    treedef: Any
    paths: tuple[str, ...]
    specs: tuple[jax.ShapeDtypeStruct, ...]
    positions: tuple[int, ...]
    static: tuple[Any, ...]
    size: int

    def build(self, values: Sequence[Any]) -> Any:
        """Leaf values -> the batch as the loss function expects it."""
        filled = list(self.static)
        for position, value in zip(self.positions, values, strict=True):
            filled[position] = value
        return jax.tree.unflatten(self.treedef, filled)

    def values(self, batch: Any, call: str) -> list[Any]:
        """The array leaves of a batch of the same structure (any batch size); messages name the user's ``call``."""
        found, treedef = jax.tree.flatten(batch)
        if treedef != self.treedef:
            raise TraceError(
                f"{call}: the batch has another structure than the traced one.",
                detail=[f"traced: {self.treedef}", f"given:  {treedef}"],
                help="pass a batch of the traced structure, or trace again.",
            )
        return [found[i] for i in self.positions]

    def specs_at(self, size: int) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the leaves for a batch of ``size`` rows."""
        return [jax.ShapeDtypeStruct((size, *s.shape[1:]) if s.shape else (), s.dtype) for s in self.specs]


def batch_layout(batch: Any) -> BatchLayout:
    """Reads the layout of a batch; every array leaf must have the same size on dimension 0 (or be a scalar)."""
    with_path, treedef = jax.tree_util.tree_flatten_with_path(batch)
    positions = tuple(i for i, (_, v) in enumerate(with_path) if is_array(v))
    specs = tuple(spec(with_path[i][1]) for i in positions)
    paths = tuple(path_text(with_path[i][0]) or "batch" for i in positions)
    if empty := [path for path, s in zip(paths, specs, strict=True) if s.shape and not s.shape[0]]:
        raise TraceError(f"trace: batch leaf {empty[0]} has no rows.", help="pass at least one row for each slice.")
    sizes = {path: s.shape[0] for path, s in zip(paths, specs, strict=True) if s.shape}
    if not sizes:
        raise TraceError("trace: the batch holds no array with a batch dimension.", help="pass arrays [batch, ...].")
    if len(set(sizes.values())) > 1:
        raise TraceError(
            "trace: leaves of the batch differ in dimension 0, the batch dimension.",
            detail=[f"{path}: {size}" for path, size in sizes.items()],
            help="put the batch on dimension 0 of every leaf; broadcast constants inside the loss function.",
        )
    static = tuple(None if is_array(v) else v for _, v in with_path)
    return BatchLayout(
        treedef=treedef, paths=paths, specs=specs, positions=positions, static=static, size=next(iter(sizes.values()))
    )
