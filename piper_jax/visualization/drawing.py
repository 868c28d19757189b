"""The public entry: a file, in the format that its suffix names."""

from __future__ import annotations

import os
from pathlib import Path

from piper_jax.arguments import checked
from piper_jax.errors import ConfigError, writing
from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import Filter
from piper_jax.ir.nodes import Compute
from piper_jax.planning.completion import complete
from piper_jax.planning.plan import Plan
from piper_jax.simulation.report import Report
from piper_jax.visualization.graph import save_graph
from piper_jax.visualization.graph_data import graph_data
from piper_jax.visualization.grid import grid_text
from piper_jax.visualization.page import page_text
from piper_jax.visualization.picture import save_picture
from piper_jax.visualization.timeline_data import timeline_data
from piper_jax.visualization.trace import save_trace

PICTURES = (".svg", ".png", ".pdf")
TIMELINES = (".html", *PICTURES, ".json", ".txt")
GRAPHS = (".html", *PICTURES)
BESIDE = (".html", ".json")


@checked(ConfigError)
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
      ConfigError: an unknown suffix, an option that means nothing here, or a file that cannot be written.
      FilterError: ``select`` matches nothing, or more than can be read.
    """
    path = Path(path)
    if isinstance(subject, Report):
        _require_suffix(path, TIMELINES, "a report")
        if select is not None:
            raise ConfigError(
                "draw(report, select=...): a report has no graph.", help="select= is for the graph of a plan."
            )
        if measured is not None and path.suffix.lower() not in BESIDE:
            raise ConfigError(
                f"draw(report, measured=...): {path.suffix} shows one report.", help=f"use {' or '.join(BESIDE)}."
            )
        with writing(path):
            _draw_report(subject, path, measured)
    else:
        _require_suffix(path, GRAPHS, "a plan")
        if measured is not None:
            raise ConfigError(
                "draw(plan, measured=...): a plan has no timeline.", help="draw(simulate(plan), path, measured=...)."
            )
        with writing(path):
            _draw_graph(_graph_dag(subject), path, select)
    return path


def _require_suffix(path: Path, known: tuple[str, ...], what: str) -> None:
    if path.suffix.lower() not in known:
        simulate = " (simulate it for a timeline)" if what == "a plan" else ""
        raise ConfigError(
            f"cannot draw {what} as {path.suffix or path.name!r}.", help=f"use {' '.join(known)}{simulate}."
        )


def _draw_report(report: Report, path: Path, measured: Report | None) -> None:
    match path.suffix.lower():
        case ".html":
            path.write_text(page_text("timeline", timeline_data(report, measured)), encoding="utf-8")
        case ".json":
            save_trace(report, path, measured)
        case ".txt":
            path.write_text(grid_text(report) + "\n", encoding="utf-8")
        case _:
            save_picture(report, path)


def _draw_graph(dag: Dag, path: Path, select: Filter | None) -> None:
    if path.suffix.lower() == ".html":
        path.write_text(page_text("graph", graph_data(dag, select)), encoding="utf-8")
    else:
        save_graph(dag, path, select)


def _graph_dag(subject: Plan | Dag) -> Dag:
    """The completed DAG if everything is placed, else the DAG as it is."""
    dag = subject if isinstance(subject, Dag) else subject.dag
    if any(isinstance(node, Compute) and node.group is None for node in dag.nodes.values()):
        return dag
    return complete(dag) if isinstance(subject, Dag) else subject.complete()
