"""Names of the arrays that programs exchange, and how each kind is laid out on its group's mesh."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Kind = Literal[
    "state", "optimizer", "gradient", "key", "step", "seed", "weight", "microbatch", "gathered", "shared",  # replicated
    "batch",
    "value", "cotangent", "residual", "crossing", "accumulator", "unreduced", "metric", "exchange",  # one per replica
    "carried",  # one per replica: what its last slice left of a state leaf, or the sum of what all its slices left
    "carried_total",  # replicated: the sum over replicas and owners
    "dispatched", "dispatched_cotangent",  # one per replica: values of experts, on the devices that hold these
    "token",  # one per replica: what the programs of a group hand on, so that they run one after another
    "state_shard", "optimizer_shard", "gradient_shard", "accumulator_shard",  # each replica's own part
    "fence",  # inside a program: what the next collective waits for
]  # fmt: skip
Layout = Literal["replicated", "stacked", "batch", "experts"]

_STACKED = frozenset(
    {
        "value", "cotangent", "residual", "crossing", "accumulator", "unreduced", "metric", "exchange", "token",
        "dispatched", "dispatched_cotangent", "carried",
    }
)  # fmt: skip
PER_SLICE = _STACKED - {"accumulator", "unreduced", "exchange", "token"}
_SHARDED = frozenset({"state_shard", "optimizer_shard", "gradient_shard", "accumulator_shard"})
ACCUMULATED = frozenset({"accumulator", "metric"})


class Key(NamedTuple):
    """One array on one group. ``item`` says which of its kind, ``mb`` the microbatch where it has one.

    ``op`` is the operation that has a copy of its own: of state that no batch changes, which all that read it carry on.
    """

    kind: Kind
    group: str
    item: Any = None
    mb: int | None = None
    op: str | None = None

    @property
    def layout(self) -> Layout:
        """replicated: the array itself on every device; stacked: ``[devices, ...]``, one entry a device (for shards
        ``[devices, length]``) or, PER_SLICE, one for each replica: ``[replicas, ...]``; batch: ``[microbatches,
        replicas, ...]``. State of divided experts, which only the context knows, is ``experts``: dimension 0 divided
        over that axis."""
        if self.kind in _STACKED or self.kind in _SHARDED:
            return "stacked"
        return "batch" if self.kind == "batch" else "replicated"

    @property
    def shard(self) -> Key:
        """The key of the sharded form of a state, optimizer, gradient or accumulator."""
        return self._replace(kind=f"{self.kind}_shard")  # type: ignore[arg-type]
