"""``split``: a batch becomes microbatches."""

from __future__ import annotations

from dataclasses import replace

from piper_jax.errors import DirectiveError, counted
from piper_jax.ir.batches import values_by_row
from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import Filter
from piper_jax.ir.forward import ForwardMap, Rewritten
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Compute, DataEdge, Node, OrderEdge
from piper_jax.ir.selection import is_split, select


def split(dag: Dag, filter: Filter, *, num_microbatches: int, coordinate: str = "MB") -> Rewritten:
    """Divides the batch into microbatches: every node from batch to loss once for each; gradients accumulate.

    Costs and values stay those of the whole batch; a node with MB has the ``num_microbatches``-th part of them. ::

        F[PP=0] layers.0 --> B[PP=0] layers.0 --> U update layers.0
        -->  split(where(), num_microbatches=2)
        F[PP=0,MB=0] layers.0 --> B[PP=0,MB=0] layers.0 --> U update layers.0
        F[PP=0,MB=1] layers.0 --> B[PP=0,MB=1] layers.0 ----^

    Args:
      dag: a DAG that is not split or ordered yet.
      filter: must select all computation, as the batch is divided as a whole; ``where()``.
      num_microbatches: at least 1; divides the batch.
      coordinate: the coordinate that counts them; always ``"MB"``.

    Raises:
      DirectiveError: the plan is split or ordered already, the filter leaves nodes out, or the batch is not divisible.
    """
    _require_legal(dag, num_microbatches, coordinate)
    chosen = set(select(dag, filter))
    for name, node in dag.nodes.items():
        if isinstance(node, Compute) and name not in chosen:
            raise DirectiveError(
                f"split covers everything from batch to loss, but {filter} leaves out {name}.",
                help="write split(where(), num_microbatches=...).",
            )
    copies = {
        name: tuple(NodeId(name.op, name.PASS, name.PP, name.EP, mb) for mb in range(num_microbatches))
        for name, node in dag.nodes.items()
        if isinstance(node, Compute)
    }
    nodes: dict[NodeId, Node] = {}
    for name, node in dag.nodes.items():
        if isinstance(node, Compute):
            for copy in copies[name]:
                nodes[copy] = Compute(id=copy, group=node.group, stream=node.stream)
        else:
            nodes[name] = node
    data = tuple(DataEdge(src, dst, e.values) for e in dag.data for src, dst in _ends(copies, e.src, e.dst))
    order = tuple(OrderEdge(src, dst, e.reason) for e in dag.order for src, dst in _ends(copies, e.src, e.dst))
    divided = replace(dag, nodes=nodes, data=data, order=order, num_microbatches=num_microbatches)
    return Rewritten(divided, ForwardMap(changed=copies))


def _ends(
    copies: dict[NodeId, tuple[NodeId, ...]], src: NodeId, dst: NodeId
) -> list[tuple[NodeId, NodeId]] | zip[tuple[NodeId, NodeId]]:
    """The copies of one edge: microbatch by microbatch, all into or all out of a node that is not divided."""
    sources, targets = copies.get(src), copies.get(dst)
    if sources is not None and targets is not None:
        return zip(sources, targets, strict=True)
    return [(s, t) for s in sources or (src,) for t in targets or (dst,)]


def _require_legal(dag: Dag, num_microbatches: int, coordinate: str) -> None:
    if coordinate != "MB":
        raise DirectiveError(f"microbatches are counted by MB, not {coordinate!r}.", help='coordinate="MB".')
    if type(num_microbatches) is not int or num_microbatches < 1:
        raise DirectiveError(
            f"num_microbatches={num_microbatches!r} is not a positive number.", help="use 1, 2, 3, ..."
        )
    if dag.slots:
        raise DirectiveError("split comes before order.", help="call plan.split(...) before plan.order([...]).")
    if is_split(dag):
        raise DirectiveError(
            f"the batch is divided into {counted(dag.num_microbatches, 'microbatch')} already.",
            help="call split once.",
            conflict="split",
        )
    for value, rows in values_by_row(dag):
        if rows % num_microbatches:
            legal = [n for n in range(1, rows + 1) if rows % n == 0]
            near = sorted(sorted(legal, key=lambda n: abs(n - num_microbatches))[:3])
            raise DirectiveError(
                f"{counted(rows, 'row')} of {value.name} {value.shape} are not divisible by "
                f"{counted(num_microbatches, 'microbatch')}.",
                help=f"nearest legal numbers of microbatches: {', '.join(str(n) for n in near)}.",
            )
