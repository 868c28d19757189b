"""Dividing a backward pass into the part for input cotangents (BI) and the part for weight gradients (BW)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from piper_jax.errors import DirectiveError
from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import Filter, Where, leaves, under
from piper_jax.ir.forward import ForwardMap, Rewritten
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Compute, DataEdge, Node, OrderEdge, Value
from piper_jax.ir.selection import index_of, paths_of


def split_backwards(dag: Dag, filters: Iterable[Filter]) -> Rewritten:
    """Splits every backward that a ``PASS="BI"`` or ``PASS="BW"`` in ``filters`` means.

    BI takes the residuals and the incoming cotangent; it gives the outgoing cotangent and the ``weight residuals``, all
    that BW needs to compute the gradients. ::

        F --residuals--> B --cotangent--> ...      -->   F --residuals--> BI --cotangent--> ...
                         B --gradient--> U                               BI --weight residuals--> BW --gradient--> U
    """
    meant = _meant(dag, filters)
    if not meant:
        return Rewritten(dag)
    for node in meant:
        op = dag.ops[node.op]
        if not op.splittable:
            raise DirectiveError(
                f"{node}: the backward of {op.name} cannot be split into BI and BW.",
                detail=(f"defined at {op.source}",) if op.source else (),
                help='list PASS="B" for it.',
            )
    halves = {n: (n._replace(PASS="BI"), n._replace(PASS="BW")) for n in meant}
    nodes: dict[NodeId, Node] = {}
    for name, node in dag.nodes.items():
        for half in halves.get(name, ()):
            nodes[half] = Compute(id=half, group=node.group, stream=node.stream)
        if name not in halves:
            nodes[name] = node
    values = dict(dag.values)
    for op in (dag.ops[name] for name in dict.fromkeys(node.op for node in meant)):
        saved = Value(name=f"weight residuals {op.name}", nbytes=op.residual_bytes)
        values.setdefault(saved.name, saved)
    data = [_half(edge, halves) for edge in dag.data]
    data += [DataEdge(bi, bw, (f"weight residuals {bi.op}",)) for bi, bw in halves.values()]
    order = tuple(
        OrderEdge(halves.get(e.src, (e.src,))[-1], halves.get(e.dst, (e.dst,))[0], e.reason) for e in dag.order
    )
    slots = tuple(replace(s, nodes=tuple(h for n in s.nodes for h in halves.get(n, (n,)))) for s in dag.slots)
    rewritten = replace(dag, nodes=nodes, data=tuple(data), order=order, slots=slots, values=values)
    return Rewritten(rewritten, ForwardMap(changed=halves))


def _meant(dag: Dag, filters: Iterable[Filter]) -> dict[NodeId, None]:
    index = index_of(dag)
    meant: dict[NodeId, None] = {}
    for filter in filters:
        for leaf in leaves(filter) if not isinstance(filter, Where) else (filter,):
            if leaf.PASS is None or not ("BI" in leaf.PASS or "BW" in leaf.PASS):
                continue
            whole = replace(leaf, PASS=("B",))
            for node in index.candidates(whole):
                found = node.PASS == "B" and whole.admits_id(node)
                if found and (leaf.path is None or under(leaf.path, paths_of(dag, node))):
                    meant[node] = None
    return meant


def _half(edge: DataEdge, halves: dict[NodeId, tuple[NodeId, NodeId]]) -> DataEdge:
    """The edge between halves: gradients leave BW, cotangents leave BI, everything enters BI."""
    if edge.src not in halves and edge.dst not in halves:
        return edge
    src, dst = edge.src, edge.dst
    if src in halves:
        gives_gradient = all(value.startswith("gradient ") for value in edge.values)
        src = halves[src][1 if gives_gradient else 0]
    return DataEdge(src, halves[dst][0] if dst in halves else dst, edge.values)
