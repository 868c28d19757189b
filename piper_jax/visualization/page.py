"""Self-contained interactive pages: one shell for the timeline of a report and the graph of a plan."""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any, Literal

from piper_jax.visualization.palette import COLORS, MEANINGS, ORDINALS, PASS_COLORS, meaning

LARGE_BYTES = 500_000
SCRIPTS = {"timeline": ("page.js", "timeline.js", "memory.js"), "graph": ("page.js", "graph.js")}


def page_text(view: Literal["timeline", "graph"], data: Mapping[str, Any]) -> str:
    """The page: no part of it is loaded from elsewhere.

    Args:
      view: which view shows the data; the shell (zoom, hover, search, legend) is the same.
      data: of :func:`timeline_data` or :func:`graph_data`; written as JSON, or deflated if it is large.
    """
    text = json.dumps({**_meanings(), **data}, separators=(",", ":"))
    is_large = len(text) > LARGE_BYTES
    parts = {
        "title": escape(data["title"]),
        "view": view,
        "style": _web_file("page.css"),
        "type": "application/deflate" if is_large else "application/json",
        "data": b64encode(zlib.compress(text.encode())).decode() if is_large else text.replace("</", "<\\/"),
        "script": "".join(map(_web_file, SCRIPTS[view])),
    }
    page = _web_file("page.html")
    for name, part in parts.items():
        page = page.replace("{{" + name + "}}", part)
    return page


def _meanings() -> dict[str, Any]:
    return {
        "colors": COLORS,
        "passColors": list(PASS_COLORS),
        "meanings": {kind: meaning(kind) for kind in MEANINGS},
        "ordinals": ORDINALS,
    }


def _web_file(name: str) -> str:
    return files("piper_jax.visualization").joinpath("web", name).read_text(encoding="utf-8")
