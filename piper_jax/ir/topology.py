"""Topological order of a few nodes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from piper_jax.ir.ids import NodeId


def in_order(nodes: Iterable[NodeId], edges: Iterable[tuple[NodeId, NodeId]]) -> tuple[NodeId, ...]:
    """``nodes`` in the order nearest to the given one in which every edge points forward.

    Nodes on or behind a cycle come last, in the given order; edges to other nodes are ignored.
    """
    listed = tuple(nodes)
    position = {node: i for i, node in enumerate(listed)}
    after: list[list[int]] = [[] for _ in listed]
    waiting = [0] * len(listed)
    for src, dst in edges:
        if src in position and dst in position:
            after[position[src]].append(position[dst])
            waiting[position[dst]] += 1
    ready = [i for i, count in enumerate(waiting) if not count]
    done: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        done.append(i)
        for j in after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(ready, j)
    reached = set(done)
    return tuple(listed[i] for i in (*done, *(i for i in range(len(listed)) if i not in reached)))
