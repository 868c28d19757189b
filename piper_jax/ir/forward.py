"""Forward maps: what became of each node of the plan that a directive rewrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from piper_jax.ir.dag import Dag
from piper_jax.ir.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardMap:
    """Maps a node of the old plan to its nodes in the new one, one to many. Nodes not listed are unchanged."""

    changed: Mapping[NodeId, tuple[NodeId, ...]] = field(default_factory=dict[NodeId, tuple[NodeId, ...]])

    def __call__(self, node: NodeId) -> tuple[NodeId, ...]:
        return self.changed.get(node, (node,))

    def then(self, later: ForwardMap) -> ForwardMap:
        """The map through this rewrite and then ``later``."""
        if not later.changed:
            return self
        changed = {node: tuple(n for i in images for n in later(i)) for node, images in self.changed.items()}
        return ForwardMap(changed={**later.changed, **changed})


class Rewritten(NamedTuple):
    """What a primitive directive returns."""

    dag: Dag
    forward: ForwardMap = ForwardMap()
