"""Pictures that stay small and can be read: level of detail, labels, legends, colours."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from matplotlib.patches import FancyBboxPatch
from pipeline_dags import one_f_one_b, pipeline_dag
from traced_dags import chain

from piper_jax import Strategy, directive
from piper_jax.errors import counted
from piper_jax.simulation import Report, Span, measured_report, simulate
from piper_jax.visualization import draw
from piper_jax.visualization.bands import runs
from piper_jax.visualization.graph import graph_figure
from piper_jax.visualization.graph_layout import layout_of
from piper_jax.visualization.graph_routes import Grid, routes_of
from piper_jax.visualization.labels import time_text, written
from piper_jax.visualization.legend import color_entries, shade_entries
from piper_jax.visualization.palette import COLORS, MEMORY_COLORS, PASS_COLORS, ink_on, meaning, shaded
from piper_jax.visualization.scene import scene_of
from piper_jax.visualization.timeline_data import timeline_data

# What the three kinds of cones give to readers who lack one (Machado, Oliveira, Fernandes 2009, severity 1).
MISSING_CONES = {
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


@pytest.fixture(scope="module")
def long() -> Report:
    return simulate(pipeline_dag(one_f_one_b, 4, 240))


@pytest.fixture(scope="module")
def overlapped() -> Report:
    strategy = Strategy(pipeline_parallel=2, num_microbatches=8, directives=(directive("DualPipeV"),))
    return simulate(chain(4, rows=8).apply(strategy))


# -- level of detail ----------------------------------------------------------------------------------
def test_bands_keep_all_time_and_a_steady_state_is_one_band(long):
    boxes, scene = scene_of(long).boxes, scene_of(long, narrow=5.0)
    for look in (("F", 0), ("B", 0)):
        drawn = sum(band.times.get(look, 0.0) for band in scene.bands)
        drawn += sum(box.end - box.start for box in scene.boxes if (box.color, box.shade) == look)
        assert drawn == pytest.approx(sum(box.end - box.start for box in boxes if (box.color, box.shade) == look))
    last = [band for band in scene.bands if scene.lanes[band.lane].group == "g3"]
    assert len(last) == 1
    assert list(last[0].strips()) == [("B", 0, 0.0, pytest.approx(2 / 3)), ("F", 0, pytest.approx(2 / 3), 1.0)]
    assert len(scene.bands) + len(scene.boxes) < 40 < 4 * 2 * 240 == len(boxes)


def test_what_can_be_seen_is_no_band():
    times = [(0, 1), (1, 2), (2, 9), (9, 10), (20, 21), (21, 22)]
    assert [list(run) for run in runs(times, narrow=4)] == [[0, 1], [2], [3], [4, 5]]
    assert [list(run) for run in runs(times, narrow=0.5)] == [[number] for number in range(6)]


def test_files_do_not_grow_with_microbatches(tmp_path, long):
    pytest.importorskip("matplotlib")
    short = simulate(pipeline_dag(one_f_one_b, 4, 24))
    few, many = (draw(report, tmp_path / "step.svg").stat().st_size for report in (short, long))
    assert many < few


# -- labels and legends -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("label", "wide", "tall", "text"),
    [
        ("2F10", 4, 1, "2F10"),
        ("2F10", 3, 2, "2F\n10"),
        ("2F10", 3, 1, "10"),
        ("2BW7", 2, 2, "7"),
        ("2F10", 1, 2, ""),
        ("all_gather", 9, 2, ""),
        ("U", 1, 1, "U"),
    ],
)
def test_labels_say_as_much_as_has_room(label, wide, tall, text):
    assert written(label, wide, tall) == text


def test_the_legend_explains_every_colour_and_shade(overlapped):
    scene = scene_of(overlapped)
    looks = scene.looks()
    assert {shade for _, shade in looks} == {0, 1}
    assert {color for color, _ in looks} == {"F", "B", "BI", "BW"}
    assert color_entries(scene) == {meaning(color): COLORS[color] for color in ("F", "B", "BI", "BW")}
    assert list(shade_entries(scene)) == ["2nd stage of its group"]
    swatches = [*color_entries(scene).values(), *shade_entries(scene).values(), *MEMORY_COLORS.values()]
    assert len(set(swatches)) == len(swatches)
    assert shade_entries(scene_of(simulate(pipeline_dag(one_f_one_b, 2, 2)))) == {}


def test_an_axis_has_one_unit_and_one_of_a_thing_is_singular():
    assert [time_text(tick, "s", like=3e-4) for tick in (0.0, 5e-7, 1e-4)] == ["0 us", "0.5 us", "100 us"]
    assert [time_text(time, "s") for time in (0.0, 5e-7, 1e-4)] == ["0 s", "500 ns", "100 us"]
    subtitle = timeline_data(simulate(pipeline_dag(one_f_one_b, 1, 1)))["subtitle"]
    assert subtitle == "1 stage, 1 microbatch, 1 device group with 1 device in all. Costs: F=1 B=2."
    assert [counted(n, noun) for n in (1, 2) for noun in ("microbatch", "leaf")] == [
        *("1 microbatch", "1 leaf", "2 microbatches", "2 leaves")
    ]


# -- colours ------------------------------------------------------------------------------------------
def _linear(color: str) -> list[float]:
    return [(int(color[at : at + 2], 16) / 255) ** 2.2 for at in (1, 3, 5)]


def _lab(linear: list[float]) -> list[float]:
    """OKLab, in which equal distances look equal."""
    mixed = ((0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.6300))
    cones = [sum(a * max(b, 0.0) for a, b in zip(row, linear, strict=True)) ** (1 / 3) for row in mixed]
    axes = ((0.2105, 0.7936, -0.0041), (1.9780, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087))
    return [sum(a * b for a, b in zip(row, cones, strict=True)) for row in axes]


@pytest.mark.parametrize("missing", MISSING_CONES)
@pytest.mark.parametrize("is_pass", [True, False], ids=["passes", "communication"])
def test_colours_differ_for_colour_blind_readers(missing, is_pass):
    seen = {
        name: _lab([sum(a * b for a, b in zip(row, _linear(color), strict=True)) for row in MISSING_CONES[missing]])
        for name, color in COLORS.items()
        if (name in PASS_COLORS) is is_pass
    }
    for one, other in combinations(seen, 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen[one], seen[other], strict=True)) ** 0.5
        assert distance > 0.075, f"{one} and {other} look the same"


def test_labels_have_contrast_on_every_colour_and_shade():
    def luminance(color: str) -> float:
        return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), _linear(color), strict=True))

    for color in COLORS.values():
        for shade in range(5):
            face = shaded(color, shade)
            dark, light = sorted((luminance(face), luminance(ink_on(face))))
            assert (light + 0.05) / (dark + 0.05) > 3.8, (color, shade)


# -- programs that were measured whole ------------------------------------------------------------------
def test_slots_that_one_program_joins_are_beside_each_other_and_overlap_slots_on_each_other():
    dag = pipeline_dag(one_f_one_b, 1, 2)
    nodes = tuple(node for slot in dag.slots for node in slot.nodes)
    assert [f"{node.PASS}{node.MB}" for node in nodes] == ["F0", "B0", "F1", "B1"]
    measured = measured_report(dag, [Span(dag.slots[0].group, "compute", "compute", nodes, 0.0, 4e-3)])
    boxes = [(box.label, box.start, box.part, box.num_parts) for box in scene_of(measured).boxes]
    assert boxes == [("F0", 0.0, 0, 1), ("B0", 1e-3, 0, 1), ("F1", 2e-3, 0, 1), ("B1", 3e-3, 0, 1)]
    assert "timed whole" in timeline_data(measured)["note"]
    together = replace(dag, slots=(replace(dag.slots[0], nodes=nodes),))
    boxes = scene_of(measured_report(together, [measured.timeline[0]])).boxes
    assert [(box.start, box.part, box.num_parts) for box in boxes] == [(0.0, part, 4) for part in range(4)]


# -- graphs ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", [Strategy(pipeline_parallel=4), Strategy(pipeline_parallel=2, data_parallel=2)])
def test_edges_of_a_graph_cross_no_node_and_labels_stay_inside(strategy):
    dag = chain(4, rows=16).apply(strategy).complete()
    layout, grid = layout_of(dag, max_nodes=100), Grid(1.0, 1.0, 0.6, 0.6)
    places = {node: (float(column), float(row)) for node, (column, row) in layout.places.items()}
    routes = routes_of(layout, places, grid)
    assert max(len(route) for route in routes) == 6
    for route in routes:
        for (x, y), (u, v) in pairwise(route) if len(route) > 2 else ():
            for left, top in places.values():
                across = min(x, u) < left + grid.wide and max(x, u) > left
                assert not (across and min(y, v) < top + grid.tall and max(y, v) > top)


def test_the_boxes_of_a_graph_have_room_for_their_labels():
    plan = chain(2, rows=8).apply(Strategy(pipeline_parallel=2, data_parallel=2, num_microbatches=2))
    figure = graph_figure(plan.complete())
    figure.canvas.draw()
    boxes = [patch.get_window_extent() for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]
    texts = [text.get_window_extent() for text in figure.axes[0].texts if text.get_zorder() == 5]
    assert len(boxes) == 12
    assert len(texts) == 24
    for text in texts:
        around = [box for box in boxes if box.x0 < text.x0 < box.x1 and box.y0 < text.y0 < box.y1]
        assert [text.x1 <= box.x1 and text.y1 <= box.y1 for box in around] == [True]
