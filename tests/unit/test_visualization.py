"""Text grids against golden files; the content of pages, pictures, traces and graphs."""

from __future__ import annotations

import json
import shutil
import subprocess
import zlib
from base64 import b64decode
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pipeline_dags import gpipe, one_f_one_b, pipeline_dag
from traced_dags import op, traced

from piper_jax import Strategy, directive, where
from piper_jax.errors import ConfigError, FilterError
from piper_jax.ir.dag import Slot
from piper_jax.ir.ids import NodeId
from piper_jax.simulation import Report, UnitCosts, measured_report, simulate
from piper_jax.visualization import draw, grid_text
from piper_jax.visualization.graph_data import graph_data
from piper_jax.visualization.graph_layout import layout_of
from piper_jax.visualization.page import page_text
from piper_jax.visualization.palette import shaded
from piper_jax.visualization.scene import scene_of
from piper_jax.visualization.timeline_data import timeline_data

pytestmark = pytest.mark.timeout(120)

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def planned() -> Report:
    return simulate(pipeline_dag(one_f_one_b, 3, 4, devices_per_stage=2), hardware="h100", title="1f1b <&>")


def overlapped() -> Report:
    """Two stages on one group; the forward of one microbatch overlaps the backward of another."""
    dag = pipeline_dag(gpipe, 2, 2)
    tasks = ["F0,0", "F1,0", "F0,1", "B1,0", "B0,0", "F1,1", "B1,1", "B0,1"]
    ids = [NodeId(f"layers.{t[1]}", t[0], PP=int(t[1]), MB=int(t[3])) for t in tasks]
    together = [ids[:1], ids[1:2], ids[2:4], ids[4:5], ids[5:6], ids[6:7], ids[7:]]
    nodes = {n: node for n, node in dag.nodes.items() if node.id.op in dag.ops}
    nodes = {n: replace(node, group="g0") for n, node in nodes.items()}
    data = tuple(edge for edge in dag.data if edge.src in nodes and edge.dst in nodes)
    slots = tuple(Slot(group="g0", nodes=tuple(members)) for members in together)
    return simulate(replace(dag, nodes=nodes, data=data, slots=slots), title="overlap")


# -- text grid --------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "title"), [("GPipe", "gpipe"), ("1F1B", "1f1b")])
def test_grids_of_named_schedules(name, title):
    flows = [(f"layers.{i}", f"layers.{i + 1}", f"dot_general.{i}") for i in range(2)]
    plan = traced([op(f"layers.{i}", i) for i in range(3)], flows)
    plan = plan.apply(Strategy(pipeline_parallel=3, num_microbatches=4, directives=(directive(name),)))
    assert grid_text(simulate(plan, title=title)) + "\n" == (GOLDEN / f"{title}.txt").read_text()


def test_grid_of_stages_that_share_a_group():
    assert grid_text(overlapped()).splitlines() == [
        "overlap  stages=2 microbatches=2  F=1 B=2  makespan=12  bubble=0.000",
        "0 | 0F0  1F0  0F1+ 1B0  =    0B0  =    1F1  1B1  =    0B1  =",
    ]


def test_grid_can_be_cut_and_scales_other_costs():
    dag = pipeline_dag(gpipe, 2, 4)
    assert grid_text(simulate(dag), max_columns=3).splitlines()[1:] == ["0 | F0 F1 F2  ...", "1 | .  F0 F1  ..."]
    halves = grid_text(simulate(dag, costs=UnitCosts(F=0.5, B=1)))
    assert halves.splitlines()[1:] == grid_text(simulate(dag)).splitlines()[1:]
    seconds = grid_text(simulate(dag, hardware="h100")).splitlines()
    assert "roofline h100" in seconds[0]
    assert {len(line) for line in seconds[1:]} == {4 + 120}


# -- the report as text and in notebooks ------------------------------------------------------------
def test_a_report_prints_as_a_table(planned):
    lines = str(planned).splitlines()
    assert lines[0].startswith("1f1b <&>  stages=3 microbatches=4  roofline h100  makespan=")
    assert lines[1].split()[:4] == ["group", "devices", "stages", "bubble"]
    assert lines[2].split()[:3] == ["g0", "0-1", "0"]
    assert lines[5] == (
        "peak on g0 during F[PP=0,MB=3] layers.0: 4.00 MiB between steps + 192.00 KiB activations + 8.00 KiB transfers"
    )
    assert repr(planned) == str(planned)


def test_a_report_shows_in_notebooks(planned):
    pytest.importorskip("matplotlib")
    html = planned._repr_html_()
    assert html.startswith("<img ")
    assert "data:image/png;base64," in html
    assert "&lt;&amp;&gt;" in html
    assert html.count("<tr>") == 4


def test_a_report_says_when_memory_does_not_fit(planned):
    assert "does not fit" not in str(planned)
    tight = replace(planned, device_bytes=1 << 20)
    assert str(tight).splitlines()[-1] == "does not fit: a device has 1.00 MiB; g0, g1, g2 need up to 4.20 MiB"


# -- scene --------------------------------------------------------------------------------------------
def test_an_overlap_slot_is_two_stripes_of_one_span():
    boxes = [box for box in scene_of(overlapped()).boxes if box.num_parts == 2]
    assert [(box.label, box.part, box.start, box.end) for box in boxes] == [("0F1", 0, 2, 5), ("1B0", 1, 2, 5)]
    assert [box.shade for box in boxes] == [0, 1], "the second stage of a group is lighter"
    assert shaded("#000000", 1) == "#555555"


# -- the interactive page -------------------------------------------------------------------------
class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loads: list[str] = []
        self.data = ""
        self._inside = False

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids.add(found.get("id") or "")
        self.loads += [value for name, value in attrs if name in ("src", "href") and value]
        self._inside = tag == "script" and found.get("id") == "data"

    def handle_data(self, data):
        self.data += data if self._inside else ""


def held(page: str) -> dict[str, Any]:
    """The data in a page, which loads nothing from elsewhere."""
    elements = _Elements()
    elements.feed(page)
    assert elements.loads == []
    assert {"title", "timeline", "memory", "graph", "search", "critical", "legend", "tip", "data"} <= elements.ids
    return json.loads(elements.data)


def test_the_page_is_self_contained_and_holds_the_report(planned):
    data = held(page_text("timeline", timeline_data(planned)))
    assert data["title"] == "1f1b <&>"
    assert data["end"] == pytest.approx(planned.makespan)
    assert [group["name"] for group in data["groups"]] == ["g0", "g1", "g2"]
    assert len(data["boxes"]["start"]) == len(planned.timeline)
    assert data["sources"]["layers.1"] == "layers.1  model.py:11"
    assert data["memoryKinds"] == ["parameters", "optimizer", "gradients", "activations", "transfers"]


def test_the_page_shows_measured_beside_planned():
    planned = simulate(pipeline_dag(one_f_one_b, 3, 4))
    ran = simulate(pipeline_dag(one_f_one_b, 3, 4), hardware="cpu")
    measured = measured_report(pipeline_dag(one_f_one_b, 3, 4), ran.timeline)
    data = timeline_data(planned, measured)
    assert data["facts"][0][0] == "makespan"
    assert data["facts"][0][2].startswith("measured ")
    assert data["unit"] == "s"
    assert [lane["measured"] for lane in data["lanes"]] == [False, True] * 3
    assert max(data["boxes"]["end"]) == pytest.approx(measured.makespan)


def test_the_page_of_a_graph_holds_nodes_with_their_sources_and_edges_with_their_bytes():
    dag = pipeline_dag(one_f_one_b, 3, 4)
    data = held(page_text("graph", graph_data(dag, where(MB=0))))
    assert data["title"] == "graph of where(MB=0)"
    assert [band["name"] for band in data["bands"]] == ["g0", "g1", "g2"]
    first = data["nodes"][0]
    assert (first["name"], first["short"], first["source"]) == ("F[PP=0,MB=0] layers.0", "F0", "model.py:10")
    assert ["computes", "250 GFLOP"] in first["facts"]
    names = [node["name"] for node in data["nodes"]]
    edges = {(names[src], names[dst]): rest for src, dst, *rest in data["edges"]}
    assert edges["F[PP=0,MB=0] layers.0", "F[PP=1,MB=0] layers.1"] == [1, "y.0", 4096]
    assert edges["F[PP=0,MB=0] layers.0", "B[PP=0,MB=0] layers.0"] == [0, "residuals layers.0", 65536]


def test_a_large_page_is_deflated(monkeypatch, planned):
    plain = page_text("timeline", timeline_data(planned))
    monkeypatch.setattr("piper_jax.visualization.page.LARGE_BYTES", 0)
    page = page_text("timeline", timeline_data(planned))
    packed = page.split('<script type="application/deflate" id="data">')[1].split("</script>")[0]
    assert json.loads(zlib.decompress(b64decode(packed))) == held(plain)
    assert len(page) < len(plain)


ASK = r"""
const wait = () => new Promise((done) => setTimeout(done, 200)), said = [];
const hover = (frame, canvas, x, y) => {
  const box = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new frame.PointerEvent("pointermove", { clientX: box.left + x, clientY: box.top + y }));
  said.push(frame.document.getElementById("tip").innerText);
};
(async () => {
  const [timeline, graph] = [frames[0], frames[1]];
  while (!timeline.page || !graph.page) await wait();
  const [section, panel] = [timeline.document.getElementById("timeline"), graph.document.getElementById("graph")];
  timeline.document.getElementById("critical").click();
  hover(timeline, section.firstElementChild, timeline.page.gutter + 4, timeline.page.lanes[0].top + 5);
  for (const id of ["legend", "facts"]) said.push(timeline.document.getElementById(id).innerText);
  timeline.page.zoom(2, { x: timeline.page.gutter, y: 0, width: section.clientWidth });
  graph.page.zoom(1.5);
  const { x, y } = graph.page.nodes.find((node) => node.name === "B[PP=1,MB=0] layers.1");
  hover(graph, panel.firstElementChild, ...graph.page.toScreen(x + 5, y + 5));
  const search = graph.document.getElementById("search");
  search.value = "F MB=0";
  search.dispatchEvent(new graph.Event("input"));
  said.push(graph.document.getElementById("found").innerText);
  await wait();
  document.title = "view " + timeline.page.view.to.toFixed(9);
  document.body.innerText = said.join("\n");
})();
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_pages_in_a_browser(planned, tmp_path, monkeypatch):
    graph = page_text("graph", graph_data(pipeline_dag(one_f_one_b, 3, 4)))
    monkeypatch.setattr("piper_jax.visualization.page.LARGE_BYTES", 0)
    pages = (page_text("timeline", timeline_data(planned)), graph)
    inside = "".join(f'<iframe width="1200" height="700" srcdoc="{escape(page)}"></iframe>' for page in pages)
    path = tmp_path / "pages.html"
    path.write_text(f"<!DOCTYPE html><body>{inside}<script>{ASK}</script></body>", encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=8000", "--enable-logging=stderr", "--dump-dom", path.as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "Uncaught" not in ran.stderr
    assert f"<title>view {planned.makespan / 2:.9f}</title>" in ran.stdout
    assert "F[PP=0,MB=0] layers.0<br>layers.0 model.py:10" in ran.stdout
    assert "F forward<br>B backward" in ran.stdout
    assert "peak memory, on g0" in ran.stdout
    assert "B[PP=1,MB=0] layers.1 on g1" in ran.stdout
    assert "residuals layers.1, 64.00 KiB" in ran.stdout
    assert "3 found" in ran.stdout


# -- files ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_pictures(planned, tmp_path, suffix, start):
    pytest.importorskip("matplotlib")
    path = draw(planned, tmp_path / f"step{suffix}")
    assert path.read_bytes().startswith(start)


def test_equal_reports_give_equal_files(planned, tmp_path):
    pytest.importorskip("matplotlib")
    for suffix in (".html", ".json", ".txt", ".svg"):
        first, second = (draw(planned, tmp_path / f"{name}{suffix}") for name in ("a", "b"))
        assert first.read_bytes() == second.read_bytes()


def test_a_trace_for_perfetto(planned, tmp_path):
    path = draw(planned, tmp_path / "step.json", measured=planned)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"g0", "g1", "g2", "g0 measured", "g1 measured", "g2 measured"}
    tasks = [event for event in events if event["ph"] == "X" and event["pid"] == 1 and event["cat"] == "compute"]
    assert tasks[0]["name"] == "F0"
    assert tasks[0]["args"] == {
        "nodes": ["F[PP=0,MB=0] layers.0"], "source": "layers.0  model.py:10", "bytes_per_device": 65536
    }  # fmt: skip
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == pytest.approx(planned.makespan * 1e6)
    starts, ends = ({e["id"] for e in events if e["ph"] == way} for way in "sf")
    assert starts == ends != set()
    assert any(event["ph"] == "C" and event["args"]["parameters"] == 1 << 20 for event in events)


def test_a_graph_of_a_selection(tmp_path):
    pytest.importorskip("matplotlib")
    dag = pipeline_dag(gpipe, 3, 4)
    for select in (where(MB=0), where()):
        assert "<svg" in draw(dag, tmp_path / "graph.svg", select=select).read_text()


def test_a_graph_joins_transfers_and_ranks_by_time():
    layout = layout_of(pipeline_dag(gpipe, 2, 2), where(MB=0), max_nodes=10)
    assert {str(node): place for node, place in layout.places.items()} == {
        "F[PP=0,MB=0] layers.0": (0, 0),
        "F[PP=1,MB=0] layers.1": (1, 1),
        "B[PP=1,MB=0] layers.1": (2, 1),
        "B[PP=0,MB=0] layers.0": (3, 0),
    }
    assert [(edge.src.PP, edge.dst.PP) for edge in layout.edges if edge.is_transfer] == [(0, 1), (1, 0)]


def test_a_graph_of_all_microbatches_has_the_order_of_its_slots():
    layout = layout_of(pipeline_dag(one_f_one_b, 2, 3), max_nodes=100)
    row = sorted((column, f"{id.PASS}{id.MB}") for id, (column, _) in layout.places.items() if id.PP == 0)
    assert [task for _, task in row] == ["F0", "F1", "B0", "F2", "B1", "B2"]
    assert layout.bands == {"g0": (0, 1), "g1": (1, 1)}, "one row for each group"


def test_what_cannot_be_drawn_is_said(planned, tmp_path):
    dag = pipeline_dag(gpipe, 8, 64)
    with pytest.raises(ConfigError, match=r"cannot draw a report as .\.gif."):
        draw(planned, tmp_path / "step.gif")
    with pytest.raises(ConfigError, match="simulate it for a timeline"):
        draw(dag, tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="select= is for the graph of a plan"):
        draw(planned, tmp_path / "step.html", select=where(MB=0))
    with pytest.raises(ConfigError) as caught:
        draw(planned, tmp_path / "step.svg", measured=planned)
    assert str(caught.value) == "draw(report, measured=...): .svg shows one report.\nhelp: use .html or .json."
    with pytest.raises(ConfigError, match=r"draw\(plan, measured=...\): a plan has no timeline"):
        draw(dag, tmp_path / "plan.svg", measured=planned)
    for write in (lambda path: draw(planned, path), lambda path: draw(dag, path, select=where(PP=0, MB=0))):
        with pytest.raises(ConfigError, match=r"cannot write .*: No such file or directory\.\nhelp: make the folder"):
            write(tmp_path / "none" / "x.html")
    with pytest.raises(FilterError, match=r"graph of 1032 nodes.*\n?.*select=where\(MB=0\).*or draw to \.html"):
        draw(dag, tmp_path / "plan.svg")
    assert draw(dag, tmp_path / "plan.html").stat().st_size < 500_000
