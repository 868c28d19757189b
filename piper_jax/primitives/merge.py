"""Merging operations of one stage into one operation, with their nodes, edges and values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from piper_jax.errors import DirectiveError
from piper_jax.ir.dag import Dag
from piper_jax.ir.forward import ForwardMap, Rewritten
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Compute, DataEdge, Node, Op, OrderEdge, Value
from piper_jax.ir.topology import in_order


def merge_ops(dag: Dag, clusters: Mapping[str, str], stage_of: Mapping[int, int]) -> Rewritten:
    """Merges operations and renumbers PP.

    Args:
      dag: a DAG without microbatches or slots.
      clusters: for each operation the representative of those that it merges with.
      stage_of: the new PP of each old one.

    Returns:
      The DAG in which each cluster is one operation; edges inside clusters are gone, and residuals are renamed.
    """
    ops, renamed = _merged_ops(dag, clusters, stage_of)
    ids = {n: _new_id(n, ops, renamed, stage_of) for n, node in dag.nodes.items() if isinstance(node, Compute)}
    residuals = {f"residuals {old}": f"residuals {new}" for old, new in renamed.items()}
    data: dict[tuple[NodeId, NodeId], dict[str, None]] = {}
    for edge in dag.data:
        src, dst = ids.get(edge.src, edge.src), ids.get(edge.dst, edge.dst)
        if src != dst:
            data.setdefault((src, dst), {}).update(dict.fromkeys(residuals.get(v, v) for v in edge.values))
    nodes: dict[NodeId, Node] = {}
    for name, node in dag.nodes.items():
        new = ids.get(name, name)
        nodes.setdefault(new, replace(node, id=new))
    edges = tuple(DataEdge(src, dst, tuple(values)) for (src, dst), values in data.items())
    pairs = dict.fromkeys((ids.get(e.src, e.src), ids.get(e.dst, e.dst), e.reason) for e in dag.order)
    order = tuple(OrderEdge(src, dst, reason) for src, dst, reason in pairs if src != dst)
    sorted_nodes = {name: nodes[name] for name in in_order(nodes, [(e.src, e.dst) for e in (*edges, *order)])}
    values = _merged_values(dag, residuals)
    forward = ForwardMap(changed={old: (new,) for old, new in ids.items() if old != new})
    return Rewritten(replace(dag, nodes=sorted_nodes, data=edges, order=order, ops=ops, values=values), forward)


def _new_id(node: NodeId, ops: Mapping[str, Op], renamed: Mapping[str, str], stage_of: Mapping[int, int]) -> NodeId:
    return node._replace(op=renamed[node.op], PP=None if node.PP is None else stage_of[node.PP])


def _merged_ops(
    dag: Dag, clusters: Mapping[str, str], stage_of: Mapping[int, int]
) -> tuple[dict[str, Op], dict[str, str]]:
    members: dict[str, list[Op]] = {}
    for op in dag.ops.values():
        members.setdefault(clusters[op.name], []).append(op)
    ops: dict[str, Op] = {}
    renamed: dict[str, str] = {}
    for together in members.values():
        name = together[0].name if len(together) == 1 else _merged_name(together, dag.ops, ops)
        merged = together[0] if len(together) == 1 else _merged_op(name, together)
        ops[name] = replace(merged, PP=None if merged.PP is None else stage_of[merged.PP])
        renamed.update((op.name, name) for op in together)
    return ops, renamed


def _merged_op(name: str, together: Sequence[Op]) -> Op:
    policies = {op.remat for op in together}
    if len(policies) > 1:
        raise DirectiveError(
            f"cut merges {together[0].name} and {together[-1].name}, which have different remat policies.",
            help="call plan.remat(...) after plan.cut(...).",
        )
    splittable = {op.splittable for op in together if op.has_backward} != {False}
    return replace(
        together[0],
        name=name,
        units=tuple(sorted({unit for op in together for unit in op.units})),
        path=" ".join(dict.fromkeys(word for op in together for word in (op.name, *op.path.split()))),
        flops_forward=sum(op.flops_forward for op in together),
        flops_backward_input=sum(op.flops_backward_input for op in together),
        flops_backward_weight=sum(op.flops_backward_weight for op in together),
        replica_means=(sum(op.replica_means[0] for op in together), sum(op.replica_means[1] for op in together)),
        residual_bytes=sum(op.residual_bytes for op in together),
        kept_bytes=sum(op.residual_bytes if op.kept_bytes is None else op.kept_bytes for op in together),
        crossing_bytes=sum(op.crossing_bytes for op in together),
        input_reads=None,
        weight_reads=None,
        reads=tuple(dict.fromkeys(bucket for op in together for bucket in op.reads)),
        carries=tuple(dict.fromkeys(bucket for op in together for bucket in op.carries)),
        batch_inputs=tuple(dict.fromkeys(path for op in together for path in op.batch_inputs)),
        has_backward=any(op.has_backward for op in together),
        splittable=splittable,
        whole_because="" if splittable else next((op.whole_because for op in together if op.whole_because), ""),
        needs_weight=any(op.needs_weight for op in together),
    )


def _merged_name(together: Sequence[Op], old: Mapping[str, Op], new: Mapping[str, Op]) -> str:
    """``layers.0-3`` for layers.0 to layers.3; ``embed-layers.1`` where the names differ before a last number."""
    names = [op.name for op in together]
    first, last = names[0], names[-1]
    head = re.fullmatch(r"(.*?)(\d+)(#\d+)?(?:-\d+)?", first)
    tail = re.fullmatch(r"(.*?)(?:\d+-)?(\d+)(?:#\d+)?", last)
    if len({re.sub(r"#\d+$", "", name) for name in names}) == 1:
        name = first
    elif head and tail and head[1] == tail[1] and int(head[2]) < int(tail[2]):
        name = f"{head[1]}{head[2]}{head[3] or ''}-{tail[2]}"
    else:
        whole = re.sub(r"#\d+$", "", last)
        name = f"{first}-{whole if whole in names[1:] else last}"
    others = {*old, *new}.difference(names)
    candidate, number = name, 2
    while candidate in others:
        candidate, number = f"{name}#{number}", number + 1
    return candidate


def _merged_values(dag: Dag, residuals: Mapping[str, str]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for name, value in dag.values.items():
        new = residuals.get(name, name)
        known = values.get(new)
        values[new] = replace(value, name=new) if known is None else replace(known, nbytes=known.nbytes + value.nbytes)
    return values
