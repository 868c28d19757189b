"""The timeline as one self-contained interactive page: zoom, hover, search, critical path, memory per group."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path

from piper_jax.simulation.report import Report
from piper_jax.visualization.page_data import page_data


def save_page(report: Report, path: Path, measured: Report | None = None) -> None:
    """Writes the page to ``path``."""
    path.write_text(page_text(report, measured), encoding="utf-8")


def page_text(report: Report, measured: Report | None = None) -> str:
    """The page: no part of it is loaded from elsewhere.

    Args:
      measured: the same step as it ran; its computations are shown below the planned ones of each group. Planned times
        in ticks are stretched to its makespan.
    """
    parts = {
        "title": escape(report.title or "step"),
        "style": _web_file("page.css"),
        "data": json.dumps(page_data(report, measured), separators=(",", ":")).replace("</", "<\\/"),
        "script": _web_file("page.js"),
    }
    text = _web_file("page.html")
    for name, part in parts.items():
        text = text.replace("{{" + name + "}}", part)
    return text


def _web_file(name: str) -> str:
    return files("piper_jax.visualization").joinpath("web", name).read_text(encoding="utf-8")
