"""What the page of a graph draws, as plain data."""

from __future__ import annotations

from typing import Any

from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import Filter
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, Node, Recv, Send, Update
from piper_jax.ir.text import group_text
from piper_jax.simulation.sizes import Sizes
from piper_jax.visualization.graph_layout import Edge, Layout, layout_of
from piper_jax.visualization.graph_routes import TRACKS, tracks_of
from piper_jax.visualization.labels import flops_text, task_label

MAX_NODES = 10_000
VALUE, TRANSFER, ORDER = range(3)


def graph_data(dag: Dag, filter: Filter | None = None) -> dict[str, Any]:
    """The data of the page, ready for JSON: nodes with their places and what is said of them, edges between numbers.

    Raises:
      FilterError: the filter selects nothing, or more than 10,000 nodes.
    """
    layout = layout_of(dag, filter, max_nodes=MAX_NODES)
    sizes, tracks = Sizes(dag) if dag.groups else None, tracks_of(layout)
    numbers = {node: number for number, node in enumerate(layout.places)}
    several_stages = has_several_stages(dag)
    kinds = list(dict.fromkeys(color_of(dag.nodes[node]) for node in layout.places))
    transfers = sum(edge.is_transfer for edge in layout.edges)
    return {
        "title": "graph of the plan" if filter is None else f"graph of {filter}",
        "subtitle": f"Execution from left to right, a band for each {'group of devices' if dag.groups else 'stage'}.",
        "facts": [
            ("nodes", f"{len(layout.places):,}", ""),
            ("edges", f"{len(layout.edges):,}", f"{transfers:,} transfers" if transfers else ""),
        ],
        "unit": "",
        "columns": layout.num_columns,
        "rows": layout.num_rows,
        "bands": [
            {"name": name, "first": first, "count": count, "about": _about(dag, name)}
            for name, (first, count) in layout.bands.items()
        ],
        "kinds": kinds,
        "nodes": [_node(dag, sizes, layout, node, kinds, several_stages) for node in layout.places],
        "edges": [_edge(dag, sizes, numbers, edge) for edge in layout.edges],
        "tracks": [tracks.get(edge, -1) for edge in layout.edges],
        "numTracks": TRACKS,
    }  # fmt: skip


def color_of(node: Node) -> str:
    """The key of ``COLORS`` for a node."""
    match node:
        case Compute() | Update():
            return node.id.PASS or "F"
        case Collective():
            return node.kind
        case Send():
            return "send"
        case Recv():
            return "recv"


def node_lines(node: Node) -> tuple[str, str]:
    """What is written on a node: its pass and coordinates over its operation, or a collective over what it moves."""
    head, _, tail = str(node.id).partition(" ")
    if not isinstance(node, Collective):
        return (head, tail) if tail else (head.removesuffix("[]"), "")
    kind, _, moved = node.id.op.partition(" ")
    return f"{kind} MB={node.id.MB}" if node.id.MB is not None else kind, moved


def has_several_stages(dag: Dag) -> bool:
    """Whether some group computes more than one stage, so that labels need the stage."""
    stages = {(node.group, id.PP) for id, node in dag.nodes.items() if isinstance(node, Compute) and id.PP is not None}
    return len(stages) > len({group for group, _ in stages})


def short_label(node: Node, *, several_stages: bool) -> str:
    """``F0`` or ``2F0``, ``U``; nothing for a collective, whose colour says it."""
    return (
        task_label([node.id], several_stages=several_stages)
        if isinstance(node, Compute)
        else "U"
        if isinstance(node, Update)
        else ""
    )


def _about(dag: Dag, band: str) -> str:
    return group_text(dag.groups[band]).partition(": ")[2] if band in dag.groups else ""


def _node(
    dag: Dag, sizes: Sizes | None, layout: Layout, id: NodeId, kinds: list[str], several_stages: bool
) -> dict[str, Any]:
    node, op = dag.nodes[id], dag.ops.get(id.op)
    head, tail = node_lines(node)
    column, row = layout.places[id]
    return {
        "column": column, "row": row, "kind": kinds.index(color_of(node)), "name": str(id), "head": head, "tail": tail,
        "short": short_label(node, several_stages=several_stages),
        "group": node.group or "", "source": op.source if op is not None else "", "facts": _facts(dag, sizes, node),
    }  # fmt: skip


def _facts(dag: Dag, sizes: Sizes | None, node: Node) -> list[tuple[str, str | int]]:
    """Name and text, or name and bytes, of what is known of a node beside its edges."""
    op = dag.ops.get(node.id.op)
    match node:
        case Compute() if op is not None:
            flops = {"F": op.flops_forward, "BI": op.flops_backward_input, "BW": op.flops_backward_weight}
            whole = flops.get(node.id.PASS or "", op.flops_backward_input + op.flops_backward_weight)
            facts: list[tuple[str, str | int]] = [("computes", flops_text(whole / dag.num_microbatches))]
            facts += [("in", op.path)] if op.path and op.path != op.name else []
            return facts + ([("reads", ", ".join(op.reads))] if op.reads else [])
        case Update(buckets=buckets):
            return [("updates", ", ".join(buckets))]
        case Collective(axes=axes, values=values):
            moved = sum(_bytes(dag, sizes, value, node.group) for value in values)
            return [("over", " x ".join(axes) or "all devices"), *([("moves", moved)] if moved else [])]
        case _:
            return []


def _edge(dag: Dag, sizes: Sizes | None, numbers: dict[NodeId, int], edge: Edge) -> tuple[int, int, int, str, int]:
    """Numbers of the nodes, kind, values, and bytes on one device of the source."""
    kind = TRANSFER if edge.is_transfer else VALUE if edge.values else ORDER
    nbytes = sum(_bytes(dag, sizes, value, dag.nodes[edge.src].group) for value in edge.values)
    return numbers[edge.src], numbers[edge.dst], kind, ", ".join(edge.values), nbytes


def _bytes(dag: Dag, sizes: Sizes | None, value: str, group: str | None) -> int:
    return sizes.value_bytes(value, group) if sizes is not None and group in dag.groups else 0
