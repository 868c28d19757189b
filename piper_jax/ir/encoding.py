"""A DAG as plain data for JSON, and back. Nodes and edges are rows that refer to nodes by their number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar, cast

from piper_jax.ir.dag import Coupling, Dag, Slot
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import (
    Bucket,
    Collective,
    Compute,
    DataEdge,
    DeviceGroup,
    Leaf,
    Node,
    Op,
    OrderEdge,
    Reads,
    Recv,
    Replication,
    Send,
    Update,
    Value,
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
        "couplings": [record(coupling) for coupling in dag.couplings],
        "nodes": [_node_row(node, number) for node in dag.nodes.values()],
        "data": [[number[e.src], number[e.dst], *e.values] for e in dag.data],
        "order": [[number[e.src], number[e.dst], e.reason] for e in dag.order],
        "slots": [[slot.group, *(number[node] for node in slot.nodes)] for slot in dag.slots],
    }


def dag_from_data(data: Mapping[str, Plain]) -> Dag:
    """The DAG that :func:`dag_data` wrote. Raises KeyError, TypeError, ValueError or IndexError on anything else."""
    rows: dict[str, list[list[Any]]] = {name: data[name] for name in ("nodes", "data", "order", "slots")}
    ids = [NodeId(*row[1:6]) for row in rows["nodes"]]
    node_at = cast(Callable[[int], NodeId], ids.__getitem__)
    nodes = [_node(row, ids) for row in rows["nodes"]]
    return Dag(
        nodes=dict(zip(ids, nodes, strict=True)),
        data=tuple(DataEdge(node_at(row[0]), node_at(row[1]), tuple(row[2:])) for row in rows["data"]),
        order=tuple(OrderEdge(node_at(row[0]), node_at(row[1]), row[2]) for row in rows["order"]),
        slots=tuple(Slot(group=row[0], nodes=tuple(node_at(i) for i in row[1:])) for row in rows["slots"]),
        ops={row["name"]: _op(row) for row in data["ops"]},
        values=_table(Value, data["values"]),
        buckets={row["name"]: _bucket(row) for row in data["buckets"]},
        groups=_table(DeviceGroup, data["groups"]),
        couplings=tuple(from_record(Coupling, row) for row in data["couplings"]),
        num_microbatches=data["num_microbatches"],
    )


def record(item: Any) -> dict[str, Plain]:
    """The fields of a dataclass that differ from their defaults."""
    written: dict[str, Plain] = {}
    for f in fields(item):
        value = getattr(item, f.name)
        if f.default is MISSING or value != f.default:
            written[f.name] = _plain(value)
    return written


def from_record(cls: type[T], row: Mapping[str, Plain]) -> T:
    """A flat dataclass from what :func:`record` wrote."""
    return cls(**{name: tuples(value) for name, value in row.items()})


def tuples(value: Plain) -> Plain:
    """Lists, at any depth, as tuples."""
    return tuple(tuples(item) for item in cast(list[Any], value)) if isinstance(value, list) else value


def _plain(value: Any) -> Plain:
    if isinstance(value, tuple):
        return [_plain(item) for item in cast(tuple[Any, ...], value)]
    return record(value) if isinstance(value, Leaf | Reads | Replication) else value


def _table(cls: type[T], rows: Iterable[Mapping[str, Plain]]) -> dict[str, T]:
    return {row["name"]: from_record(cls, row) for row in rows}


def _op(row: Mapping[str, Plain]) -> Op:
    nested = ("input_reads", "weight_reads")
    halves = {name: from_record(Reads, row[name]) for name in nested if row.get(name) is not None}
    return replace(from_record(Op, {name: value for name, value in row.items() if name not in nested}), **halves)


def _bucket(row: Mapping[str, Plain]) -> Bucket:
    flat = {name: value for name, value in row.items() if name not in ("leaves", "replication")}
    replication = row.get("replication")
    return Bucket(
        leaves=tuple(from_record(Leaf, leaf) for leaf in row["leaves"]),
        replication=None if replication is None else from_record(Replication, replication),
        **flat,
    )


def _node_row(node: Node, number: Mapping[NodeId, int]) -> list[Plain]:
    row: list[Plain] = [type(node).__name__, *node.id, node.group, node.stream]
    if not isinstance(node, Compute):
        extra = {name: value for name, value in record(node).items() if name not in ("id", "group", "stream")}
        if isinstance(node, Send | Recv):
            extra["match"] = number[node.match]
        row.append(extra)
    return row


def _node(row: Sequence[Plain], ids: Sequence[NodeId]) -> Node:
    written: dict[str, Plain] = row[8] if len(row) > 8 else {}
    extra = {name: tuples(value) for name, value in written.items()}
    if "match" in extra:
        extra["match"] = ids[extra["match"]]
    return NODE_CLASSES[row[0]](id=NodeId(*row[1:6]), group=row[6], stream=row[7], **extra)
