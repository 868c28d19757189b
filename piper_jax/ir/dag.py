"""The global training DAG: nodes, edges, the order of each group, and the tables they refer to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from piper_jax.errors import counted
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Bucket, Count, DataEdge, DeviceGroup, Node, Op, OrderEdge, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Nodes of one group that become one program; their collectives may overlap their compute."""

    group: str
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coupling:
    """What an optimizer update exchanges between groups after ``round`` (a global norm): some scalars."""

    round: Count
    buckets: tuple[str, ...]
    nbytes: Count


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Dag:
    """One training step over all devices. A value: directives return new ones.

    Attributes:
      nodes: in a deterministic order that is topological where no order directive says otherwise.
      data, order: edges.
      slots: the slots named by ``order`` directives, in the order in which each group runs them. Nodes in no slot run
        as early as their edges allow, each as a slot of its own.
      ops, values, buckets, groups: the static tables, by name.
      couplings: exchanges between rounds of the optimizer update.
      common_optimizer_bytes: of optimizer arrays of no one bucket; every group that updates keeps them whole.
      num_microbatches: 1 before ``split``.
      memo: facts derived from the other fields (an index, the contracted graph), computed once; never saved.
    """

    nodes: Mapping[NodeId, Node] = field(default_factory=dict[NodeId, Node])
    data: tuple[DataEdge, ...] = ()
    order: tuple[OrderEdge, ...] = ()
    slots: tuple[Slot, ...] = ()
    ops: Mapping[str, Op] = field(default_factory=dict[str, Op])
    values: Mapping[str, Value] = field(default_factory=dict[str, Value])
    buckets: Mapping[str, Bucket] = field(default_factory=dict[str, Bucket])
    groups: Mapping[str, DeviceGroup] = field(default_factory=dict[str, DeviceGroup])
    couplings: tuple[Coupling, ...] = ()
    common_optimizer_bytes: Count = 0
    num_microbatches: int = 1
    memo: dict[str, Any] = field(default_factory=dict[str, Any], init=False, repr=False, compare=False)

    def __str__(self) -> str:
        from piper_jax.ir.text import summary_text

        return summary_text(self)

    def __repr__(self) -> str:
        parts = {"node": self.nodes, "edge": self.data, "group": self.groups}
        return f"Dag({', '.join(counted(len(items), noun) for noun, items in parts.items())})"
