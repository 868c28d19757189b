"""A plan as text: its size, the directives that made it, and the order of each group."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from piper_jax.ir.nodes import Collective, Compute
from piper_jax.ir.ownership import ownerships
from piper_jax.ir.text import group_text, order_rows, whole_lines
from piper_jax.planning.stage_table import largest_share, stage_lines

if TYPE_CHECKING:
    from piper_jax.planning.plan import Plan

MAX_CELLS = 32
MAX_ROWS = 24
MAX_STAGES = 16
UNEVEN = 1.5  # times its even share in the largest stage: the table says which equation holds much and is one unit


def plan_text(plan: Plan) -> str:
    """What ``print(plan)`` shows: at most a few screens, whatever the size of the plan."""
    lines = [headline(plan)]
    if plan.history:
        lines += ["directives", *_shortened([f"  {record}" for record in plan.history])]
    lines += _stage_lines(plan)
    lines += _group_lines(plan) if _is_placed(plan) else []
    lines += _shortened(whole_lines(plan.dag))
    return "\n".join(lines)


def headline(plan: Plan) -> str:
    """One line: how large the plan is."""
    devices = sum(len(group.devices) for group in plan.groups.values())
    return (
        f"plan  stages={plan.num_stages} microbatches={plan.num_microbatches} "
        f"groups={len(plan.groups)} devices={devices} nodes={len(plan.dag.nodes)}"
    )


def _is_placed(plan: Plan) -> bool:
    return bool(plan.groups) and not any(
        isinstance(node, Compute) and node.group is None for node in plan.dag.nodes.values()
    )


def _stage_lines(plan: Plan) -> list[str]:
    rows = stage_lines(plan.dag)
    uneven = any(record.name == "cut" for record in plan.history) and plan.num_stages * largest_share(plan.dag) > UNEVEN
    notes = (*plan.source.uncounted, *(plan.source.undivided if uneven else ()))
    notes = _shortened([f"  {line}" for line in notes])
    return ["stages", *rows[:1], *_shortened(rows[1:], MAX_STAGES), *notes] if rows else []


def _group_lines(plan: Plan) -> list[str]:
    groups = _shortened([f"  {group_text(group)}" for group in plan.groups.values()])
    rows = order_rows(plan.complete())
    shown = {name: row[:MAX_CELLS] for name, row in rows.items()}
    width = max((len(cell) for row in shown.values() for cell in row), default=1)
    margin = max((len(name) for name in rows), default=1)
    grid = [
        f"  {name:<{margin}} | "
        + " ".join(f"{cell:<{width}}" for cell in row).rstrip()
        + (f" ... {len(rows[name]) - MAX_CELLS} more" if len(rows[name]) > MAX_CELLS else "")
        for name, row in shown.items()
    ]
    return ["groups", *groups, "order", *_shortened(grid), *_collective_lines(plan)]


def _collective_lines(plan: Plan) -> list[str]:
    """How many collectives of each kind a step has, and whose state is gathered for its update."""
    dag = plan.complete()
    counts = Counter(node.kind for node in dag.nodes.values() if isinstance(node, Collective))
    if not counts:
        return []
    whole = [name for name, owned in ownerships(dag).items() if owned.num_shards > 1 and not owned.elementwise]
    gathered = [f"  gathered for the update: {', '.join(whole)}"] if whole else []
    common = dag.common_optimizer_bytes
    kept = [f"  optimizer state of no one bucket, kept whole on every group: {common:,} bytes"] if common else []
    return [
        "collectives", "  " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())), *gathered, *kept,
    ]  # fmt: skip


def _shortened(rows: list[str], most: int = MAX_ROWS) -> list[str]:
    return rows if len(rows) <= most else [*rows[:most], f"  ... {len(rows) - most} more"]
