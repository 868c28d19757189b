"""A DAG as text: what each group runs, slot by slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from piper_jax.ir.dag import Dag, Slot
from piper_jax.ir.device_groups import axes_of
from piper_jax.ir.filters import Filter
from piper_jax.ir.ids import NodeId
from piper_jax.ir.linear import linearize
from piper_jax.ir.nodes import Bucket, Collective, Compute, DeviceGroup, Node, Recv, Send, Update
from piper_jax.ir.ownership import shard_axes_of
from piper_jax.ir.selection import numbers_text, select

MAX_ROWS = 24


def dag_text(dag: Dag) -> str:
    """The canonical text of a completed DAG: groups, state, and every slot of every group in its order.

    A line is one slot; further members of a slot follow on lines with ``with``. Equal DAGs give equal text.
    """
    return "\n".join(line for section in _sections(dag) for line in section) + "\n"


def summary_text(dag: Dag) -> str:
    """What ``print(dag)`` shows: :func:`dag_text` with the first slots of each group, or the nodes before placement."""
    if any(node.group not in dag.groups for node in dag.nodes.values()):
        return "\n".join(["nodes", *_shortened([f"  {node_text(node)}" for node in dag.nodes.values()])])
    lines: list[str] = []
    for head, *rows in _sections(dag):
        lines += [head, *_shortened(rows)]
    return "\n".join(lines)


def selection_text(dag: Dag, filter: Filter) -> str:
    """The nodes that ``filter`` selects, with group, path and line, what they take from where and give to whom."""
    chosen = select(dag, filter)
    into: dict[NodeId, list[str]] = {node: [] for node in chosen}
    out: dict[NodeId, list[str]] = {node: [] for node in chosen}
    for edge in dag.data:
        if edge.dst in into:
            into[edge.dst].append(f"    <- {', '.join(edge.values)}  from {edge.src}")
        if edge.src in out:
            out[edge.src].append(f"    -> {', '.join(edge.values)}  to {edge.dst}")
    lines: list[str] = []
    for node in chosen:
        op = dag.ops.get(node.op)
        place = f"  {op.path} at {op.source}" if op is not None and op.source else ""
        lines += [f"{node}  on {dag.nodes[node].group}{place}", *into[node], *out[node]]
    return "\n".join(lines)


def whole_lines(dag: Dag) -> list[str]:
    """Operations whose backward is in one piece though an order asks for BI and BW, and why; no line without any."""
    kept = [op for op in dag.ops.values() if op.kept_whole]
    rows = [
        f"  {op.name}" + (f" at {op.source}" if op.source else "") + f": {op.whole_because or 'it is not splittable'}"
        for op in kept
    ]
    return ["whole backwards, in place of BI and BW", *rows] if kept else []


def group_text(group: DeviceGroup) -> str:
    """``g0: devices 0-3, data=2 expert=2``."""
    ids = group.devices
    devices = numbers_text(ids) if list(ids) == sorted(ids) else ", ".join(str(i) for i in ids)
    return f"{group.name}: devices {devices}, " + " ".join(f"{axis}={size}" for axis, size in axes_of(group))


def bucket_text(bucket: Bucket, sharded: frozenset[str] = frozenset()) -> str:
    """``embed: 2 leaves, 1024 bytes, ZeRO-3 over data``; ``sharded`` are axes that divide its operations."""
    nbytes = sum(leaf.nbytes for leaf in bucket.leaves)
    count = f"{len(bucket.leaves)} leaf" if len(bucket.leaves) == 1 else f"{len(bucket.leaves)} leaves"
    parts = [f"{bucket.name}: {count}", f"{nbytes} bytes"]
    if sharded:
        parts.append(f"sharded over {' x '.join(sorted(sharded))}")
    r = bucket.replication
    if r is not None:
        zero = 3 if r.shard_params else 2 if r.shard_grads else 1 if r.shard_optimizer else 0
        axes = " x ".join(axis for axis in r.axes if axis not in sharded)
        parts.append(f"{f'ZeRO-{zero}' if zero else 'replicated'} over {axes}")
        if zero and not bucket.elementwise:
            parts.append("gathered for the update")
    return ", ".join(parts)


def slot_lines(dag: Dag, slot: Slot, group: str) -> list[str]:
    """The members of a slot; ``(on g0+g3)`` where it is on a joint group."""
    first, *others = [node_text(dag.nodes[node]) for node in slot.nodes]
    return [f"  {first}" + ("" if slot.group == group else f"  (on {slot.group})"), *(f"    with {o}" for o in others)]


def node_text(node: Node) -> str:
    """One node with what it moves or updates."""
    match node:
        case Compute():
            return str(node.id)
        case Update(buckets=buckets):
            return f"{node.id}: {', '.join(buckets)}"
        case Send(values=values) | Recv(values=values):
            return f"{node.id}: {', '.join(values)}"
        case Collective(axes=axes, values=values):
            return f"{node.id} over {' x '.join(axes) or 'all'}: {', '.join(values)}"


def cells(nodes: Iterable[NodeId], show_stage: bool) -> str:
    """A slot in a grid: ``F3``, ``B2``, ``F3+B2``; with the stage, ``F1.3`` is microbatch 3 of stage 1."""
    seen: dict[str, None] = {}
    for node in nodes:
        stage = f"{node.PP}." if show_stage and node.PP is not None else ""
        seen.setdefault(f"{node.PASS}{stage}{'' if node.MB is None else node.MB}", None)
    return "+".join(seen)


def order_rows(dag: Dag) -> Mapping[str, tuple[str, ...]]:
    """For each group the computation in its order, one cell a slot, communication left out."""
    rows: dict[str, tuple[str, ...]] = {}
    for group, slots in linearize(dag).items():
        computed = [[n for n in slot.nodes if isinstance(dag.nodes[n], Compute | Update)] for slot in slots]
        show_stage = len({n.PP for nodes in computed for n in nodes if n.PP is not None}) > 1
        rows[group] = tuple(cells(nodes, show_stage) for nodes in computed if nodes)
    return rows


def _sections(dag: Dag) -> Iterator[list[str]]:
    """The groups, the state, and the slots of each group, each under its heading."""
    sharded = shard_axes_of(dag)
    yield ["groups", *(f"  {group_text(group)}" for group in dag.groups.values())]
    yield ["state", *(f"  {bucket_text(b, sharded.get(b.name, frozenset()))}" for b in dag.buckets.values())]
    for group, slots in linearize(dag).items():
        yield [group, *(line for slot in slots for line in slot_lines(dag, slot, group))]


def _shortened(rows: Sequence[str]) -> list[str]:
    more = len(rows) - MAX_ROWS
    return [*rows[:MAX_ROWS], f"  ... {more} more"] if more > 0 else list(rows)
