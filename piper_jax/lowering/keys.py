"""Names of the arrays that programs exchange, and how each kind is laid out on its group's mesh."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Kind = Literal[
    "state", "optimizer", "key", "step", "gradient", "seed", "weight", "microbatch", "gathered", "shared",  # replicated
    "batch",
    "value", "cotangent", "residual", "crossing", "accumulator", "metric", "exchange",  # one entry per replica
]  # fmt: skip
Layout = Literal["replicated", "stacked", "batch"]

_STACKED = frozenset({"value", "cotangent", "residual", "crossing", "accumulator", "metric", "exchange"})
ACCUMULATED = frozenset({"accumulator", "metric"})


class Key(NamedTuple):
    """One array on one group. ``item`` says which of its kind, ``mb`` the microbatch where it has one."""

    kind: Kind
    group: str
    item: Any = None
    mb: int | None = None

    @property
    def layout(self) -> Layout:
        """replicated: the array itself on every device; stacked: ``[replicas, ...]``, one entry a device; batch:
        ``[microbatches, replicas, ...]``."""
        return "stacked" if self.kind in _STACKED else "batch" if self.kind == "batch" else "replicated"
