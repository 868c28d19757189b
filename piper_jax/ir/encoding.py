"""A DAG as plain data for JSON. Nodes and edges are rows that refer to nodes by their number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, cast

from piper_jax.ir.dag import Dag
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import (
    Collective,
    Compute,
    Layered,
    Leaf,
    Node,
    Reads,
    Recv,
    Replication,
    Send,
    Update,
)

T = TypeVar("T")
Plain = Any
NODE_CLASSES: Mapping[str, type[Any]] = {cls.__name__: cls for cls in (Compute, Update, Send, Recv, Collective)}


def dag_data(dag: Dag) -> dict[str, Plain]:
    """``dag`` as dicts, lists, strings and numbers."""
    number = {node: i for i, node in enumerate(dag.nodes)}
    return {
        "num_microbatches": dag.num_microbatches,
        "groups": [record(group) for group in dag.groups.values()],
        "ops": [record(op) for op in dag.ops.values()],
        "values": [record(value) for value in dag.values.values()],
        "buckets": [record(bucket) for bucket in dag.buckets.values()],
        "common_optimizer_bytes": dag.common_optimizer_bytes,
        "couplings": [record(coupling) for coupling in dag.couplings],
        "nodes": [_node_row(node, number) for node in dag.nodes.values()],
        "data": [[number[e.src], number[e.dst], *e.values] for e in dag.data],
        "order": [[number[e.src], number[e.dst], e.reason] for e in dag.order],
        "slots": [[slot.group, *(number[node] for node in slot.nodes)] for slot in dag.slots],
    }


def record(item: Any) -> dict[str, Plain]:
    """The fields of a dataclass that differ from their defaults."""
    written: dict[str, Plain] = {}
    for f in fields(item):
        value = getattr(item, f.name)
        if f.default is MISSING or value != f.default:
            written[f.name] = _plain(value)
    return written


def _plain(value: Any) -> Plain:
    if isinstance(value, tuple):
        return [_plain(item) for item in cast(tuple[Any, ...], value)]
    return record(value) if isinstance(value, Leaf | Layered | Reads | Replication) else value


def _node_row(node: Node, number: Mapping[NodeId, int]) -> list[Plain]:
    row: list[Plain] = [type(node).__name__, *node.id, node.group, node.stream]
    if not isinstance(node, Compute):
        extra = {name: value for name, value in record(node).items() if name not in ("id", "group", "stream")}
        if isinstance(node, Send | Recv):
            extra["match"] = number[node.match]
        row.append(extra)
    return row
