"""How notebooks show plans and reports: the timeline as a picture, then tables; legible on light and dark pages."""

from __future__ import annotations

import base64
from html import escape

from piper_jax.errors import ConfigError, counted
from piper_jax.ir.nodes import Compute
from piper_jax.ir.text import group_text, order_rows
from piper_jax.planning.display import headline, plan_text
from piper_jax.planning.plan import Plan
from piper_jax.simulation import simulate
from piper_jax.simulation.report import Report
from piper_jax.visualization.grid import grid_text, heading_text
from piper_jax.visualization.palette import PASS_COLORS, ink_on
from piper_jax.visualization.picture import png_bytes
from piper_jax.visualization.summary import MAX_ROWS, report_table, rest_lines

FONT = "font:12px system-ui,sans-serif"
CELL = f"padding:2px 10px;text-align:right;white-space:nowrap;{FONT}"
TASK = "padding:1px 5px;text-align:center;white-space:nowrap;font:12px monospace"
MAX_CELLS = 32
MAX_SIMULATED = 5_000  # nodes; a larger plan shows its order without a picture
MAX_COLUMNS = 200


def report_html(report: Report) -> str:
    """The timeline and the table of a report; the text grid where matplotlib is not installed."""
    header, *rows = report_table(report)
    more = [[f"... {counted(len(rows) - MAX_ROWS, 'more group')}"]] if len(rows) > MAX_ROWS else []
    head = "".join(f'<th style="{CELL}">{escape(cell)}</th>' for cell in header)
    body = "".join(
        "<tr>" + "".join(f'<td style="{CELL}">{escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows[:MAX_ROWS] + more
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    lines = rest_lines(report)
    notes = f'<div style="{FONT};padding:4px 10px">{"<br>".join(map(escape, lines))}</div>' if lines else ""
    shown = _picture(report) or f"<pre>{escape(grid_text(report, max_columns=MAX_COLUMNS))}</pre>"
    return f'{shown}<div style="overflow-x:auto">{table}</div>{notes}'


def plan_html(plan: Plan) -> str:
    """Size, timeline in ticks, and folded away the order of each group, directives and groups.

    A plan that is not placed shows its text, a large one its order alone.
    """
    if not plan.groups or any(isinstance(node, Compute) and node.group is None for node in plan.dag.nodes.values()):
        return f"<pre>{escape(plan_text(plan))}</pre>"
    dag = plan.complete()
    picture = _picture(simulate(plan, title="plan")) if len(dag.nodes) <= MAX_SIMULATED else ""
    rows = list(order_rows(dag).items())
    more = (
        f'<div style="{FONT}">... {counted(len(rows) - MAX_ROWS, "more group")}</div>' if len(rows) > MAX_ROWS else ""
    )
    table = "".join(_order_row(name, cells) for name, cells in rows[:MAX_ROWS])
    order = f'<div style="overflow-x:auto"><table>{table}</table></div>{more}'
    text = escape("\n".join([*map(str, plan.history), "", *map(group_text, plan.groups.values())]))
    counts = f"{counted(len(plan.history), 'directive')}, {counted(len(plan.groups), 'group')}"
    return (
        f'<div style="{FONT};font-weight:600">{escape(headline(plan))}</div>{picture}'
        f"{_folded('order of each group', order) if picture else order}"
        f"{_folded(counts, f'<pre>{text}</pre>')}"
    )


def _picture(report: Report) -> str:
    """An image, or nothing where matplotlib is not installed."""
    try:
        image = base64.b64encode(png_bytes(report)).decode()
    except ConfigError:
        return ""
    return f'<img alt="{escape(heading_text(report))}" src="data:image/png;base64,{image}" width="100%">'


def _folded(summary: str, content: str) -> str:
    return f'<details><summary style="{FONT};cursor:pointer">{escape(summary)}</summary>{content}</details>'


def _order_row(name: str, cells: tuple[str, ...]) -> str:
    shown = "".join(_order_cell(cell) for cell in cells[:MAX_CELLS])
    more = f'<td style="{CELL}">... {len(cells) - MAX_CELLS} more</td>' if len(cells) > MAX_CELLS else ""
    return f'<tr><th style="{CELL}">{escape(name)}</th>{shown}{more}</tr>'


def _order_cell(cell: str) -> str:
    """One slot; tasks that overlap in it stand beside each other."""
    if "+" not in cell:
        return f'<td style="{TASK};{_paint(cell)}">{escape(cell)}</td>'
    tasks = (f'<span style="{TASK};{_paint(task)}">{escape(task)}</span>' for task in cell.split("+"))
    return f'<td style="padding:1px 2px;white-space:nowrap">{"".join(tasks)}</td>'


def _paint(task: str) -> str:
    color = PASS_COLORS.get(task[:2], PASS_COLORS.get(task[:1], "#7a8591"))
    return f"color:{ink_on(color)};background:{color}"
