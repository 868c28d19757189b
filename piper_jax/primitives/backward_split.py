"""Dividing a backward pass into the part for input cotangents (BI) and the part for weight gradients (BW)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import Filter, Where, leaves, selects, under
from piper_jax.ir.forward import ForwardMap, Rewritten
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Compute, DataEdge, Node, OrderEdge, Value
from piper_jax.ir.selection import found, index_of, keep_index, paths_of, select


def split_backwards(dag: Dag, filters: Iterable[Filter]) -> Rewritten:
    """Splits every backward that a ``PASS="BI"`` or ``PASS="BW"`` in ``filters`` means.

    BI takes the residuals and the incoming cotangent; it gives the outgoing cotangent and the ``weight residuals``, all
    that BW needs to compute the gradients. ::

        F --residuals--> B --cotangent--> ...      -->   F --residuals--> BI --cotangent--> ...
                         B --gradient--> U                               BI --weight residuals--> BW --gradient--> U

    An operation that is not splittable keeps its B, and is marked ``kept_whole``.
    """
    named = _meant(dag, filters, ("BI", "BW"))
    dag = _marked(dag, {node.op for node in named if not dag.ops[node.op].splittable})
    meant = [node for node in named if dag.ops[node.op].splittable]
    if not meant:
        return Rewritten(dag)
    halves = {n: (n._replace(PASS="BI"), n._replace(PASS="BW")) for n in meant}
    nodes: dict[NodeId, Node] = {}
    for name, node in dag.nodes.items():
        for half in halves.get(name, ()):
            nodes[half] = Compute(id=half, group=node.group, stream=node.stream)
        if name not in halves:
            nodes[name] = node
    values = dict(dag.values)
    for op in (dag.ops[name] for name in dict.fromkeys(node.op for node in meant)):
        kept = op.residual_bytes if op.kept_bytes is None else op.kept_bytes
        saved = Value(name=f"weight residuals {op.name}", nbytes=kept + op.crossing_bytes)
        values.setdefault(saved.name, saved)
    data = [_half(edge, halves) for edge in dag.data]
    data += [DataEdge(bi, bw, (f"weight residuals {bi.op}",)) for bi, bw in halves.values()]
    order = tuple(
        OrderEdge(halves.get(e.src, (e.src,))[-1], halves.get(e.dst, (e.dst,))[0], e.reason) for e in dag.order
    )
    slots = tuple(replace(s, nodes=tuple(h for n in s.nodes for h in halves.get(n, (n,)))) for s in dag.slots)
    rewritten = replace(dag, nodes=nodes, data=tuple(data), order=order, slots=slots, values=values)
    return Rewritten(rewritten, ForwardMap(changed=halves))


@dataclass(frozen=True, slots=True)
class Whole:
    """Backwards that stay whole, though filters name halves of them: those of which BI is named, and BW."""

    inputs: Mapping[NodeId, None]
    weights: Mapping[NodeId, None]


def whole_backwards(dag: Dag, filters: Sequence[Filter]) -> Whole:
    """What of ``dag``, in which the others are split, stays whole."""
    if not any(op.kept_whole for op in dag.ops.values()):
        return Whole({}, {})
    return Whole(_meant(dag, filters, ("BI",)), _meant(dag, filters, ("BW",)))


def select_in_halves(dag: Dag, filter: Filter, whole: Whole) -> Collection[NodeId]:
    """The nodes that ``filter`` selects, where a backward that stays whole counts as its own BI and has no BW.

    Raises:
      FilterError: nothing matches, not even a BW that is left out.
    """
    if not whole.inputs and not whole.weights:
        return select(dag, filter)
    if isinstance(filter, Where):
        chosen = dict.fromkeys((*found(dag, filter), *_meant(dag, (filter,), ("BI",))))
    else:
        counted = ((n, n._replace(PASS="BI") if n in whole.inputs else n) for n in index_of(dag).ids)
        chosen = [n for n, known in counted if selects(filter, known, lambda node: paths_of(dag, node))]
    left_out = not chosen and any(n in whole.weights for n in _meant(dag, (filter,), ("BW",)))
    return chosen if chosen or left_out else select(dag, filter)


def _marked(dag: Dag, whole: Collection[str]) -> Dag:
    if not whole:
        return dag
    ops = {name: replace(op, kept_whole=True) if name in whole else op for name, op in dag.ops.items()}
    return keep_index(dag, replace(dag, ops=ops))


def _meant(dag: Dag, filters: Iterable[Filter], passes: Sequence[str]) -> dict[NodeId, None]:
    """Whole backwards whose halves, of those in ``passes``, a filter names."""
    index = index_of(dag)
    meant: dict[NodeId, None] = {}
    for filter in filters:
        for leaf in leaves(filter) if not isinstance(filter, Where) else (filter,):
            if leaf.PASS is None or not any(name in leaf.PASS for name in passes):
                continue
            whole = replace(leaf, PASS=("B",))
            for node in index.candidates(whole):
                is_meant = node.PASS == "B" and whole.admits_id(node)
                if is_meant and (leaf.path is None or under(leaf.path, paths_of(dag, node))):
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
