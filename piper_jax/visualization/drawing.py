"""The public entry: a file, in the format that its suffix names."""

from __future__ import annotations

import os
from pathlib import Path

from piper_jax.errors import ConfigError
from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import Filter
from piper_jax.ir.nodes import Compute
from piper_jax.planning.completion import complete
from piper_jax.planning.plan import Plan
from piper_jax.simulation.report import Report
from piper_jax.visualization.graph import save_graph
from piper_jax.visualization.grid import grid_text
from piper_jax.visualization.page import save_page
from piper_jax.visualization.picture import save_picture
from piper_jax.visualization.trace import save_trace

PICTURES = (".svg", ".png", ".pdf")
TIMELINES = (".html", *PICTURES, ".json", ".txt")
GRAPHS = (".html", *PICTURES)


def draw(
    subject: Report | Plan | Dag,
    path: str | os.PathLike[str],
    *,
    measured: Report | None = None,
    select: Filter | None = None,
) -> Path:
    """Draws the timeline of a report, or the graph of a plan, to a file.

    Args:
      subject: a report of :func:`piper_jax.simulate`, or a plan.
      path: the suffix names the format. Reports: ``.html`` (one interactive page), ``.svg .png .pdf`` (a picture),
        ``.json`` (Chrome trace, for Perfetto), ``.txt`` (the text grid). Plans: ``.html .svg .png .pdf``.
      measured: a report of the same step as it ran, shown beside the planned one (``.html`` and ``.json``).
      select: which nodes of a plan to show; communication between them is shown too.

    Returns:
      The path.

    Raises:
      ConfigError: an unknown suffix, or an option that means nothing here.
      FilterError: ``select`` matches nothing, or more than can be read.
    """
    path = Path(path)
    if isinstance(subject, Report):
        _check(path, TIMELINES, "a report", select is None, "select= is for the graph of a plan.")
        _check(
            path, TIMELINES, "a report", measured is None or path.suffix in (".html", ".json"), "use .html or .json."
        )
        _draw_report(subject, path, measured)
    else:
        _check(path, GRAPHS, "a plan", measured is None, "measured= is for the timeline of a report.")
        save_graph(_graph_dag(subject), path, select)
    return path


def _check(path: Path, known: tuple[str, ...], what: str, legal: bool, help: str) -> None:
    if path.suffix not in known:
        simulate = " (simulate it for a timeline)" if what == "a plan" else ""
        raise ConfigError(
            f"cannot draw {what} as {path.suffix or path.name!r}.", help=f"use {' '.join(known)}{simulate}."
        )
    if not legal:
        raise ConfigError(f"this option does not go with {what} as {path.suffix}.", help=help)


def _draw_report(report: Report, path: Path, measured: Report | None) -> None:
    match path.suffix:
        case ".html":
            save_page(report, path, measured)
        case ".json":
            save_trace(report, path, measured)
        case ".txt":
            path.write_text(grid_text(report) + "\n", encoding="utf-8")
        case _:
            save_picture(report, path)


def _graph_dag(subject: Plan | Dag) -> Dag:
    """The completed DAG if everything is placed, else the DAG as it is."""
    dag = subject if isinstance(subject, Dag) else subject.dag
    if any(isinstance(node, Compute) and node.group is None for node in dag.nodes.values()):
        return dag
    return complete(dag) if isinstance(subject, Dag) else subject.complete()
