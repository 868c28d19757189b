"""``piper simulate`` and ``piper show`` on a saved plan: no model, no JAX, no process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from traced_dags import chain
from typer.testing import CliRunner

from piper_jax import Strategy, where
from piper_jax.cli.main import app
from piper_jax.cli.selection import parsed_filter
from piper_jax.ir.filters import Filter


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    chain(4).apply(Strategy(pipeline_parallel=2, data_parallel=2, num_microbatches=4)).save(path)
    return str(path)


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def test_simulate_prints_the_report(plan_file: str) -> None:
    assert "makespan=15  bubble=0.200" in run("simulate", plan_file)
    assert "roofline h100" in run("simulate", plan_file, "--hardware", "h100")


def test_show_prints_the_grid(plan_file: str) -> None:
    assert "1 | .  F0 B0 =  F1 B1 =  F2 B2 =  F3 B3 =  .  ." in run("show", plan_file)


def test_show_prints_selected_nodes_with_what_they_take_and_give(plan_file: str) -> None:
    lines = run("show", plan_file, "--select", "PP=1,MB=2,PASS=F").splitlines()
    assert lines[0].startswith("F[PP=1,MB=2]")
    assert "on g1" in lines[0]
    assert sum("<- " in line for line in lines) == 1
    assert sum("-> residuals" in line for line in lines) == 1


@pytest.mark.parametrize("suffix", [".html", ".svg", ".json", ".txt"])
def test_show_and_simulate_draw(plan_file: str, suffix: str, tmp_path: Path) -> None:
    for command in ("show", "simulate"):
        path = tmp_path / f"{command}{suffix}"
        run(command, plan_file, "-o", str(path))
        assert path.stat().st_size > 100


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--select", "PP=9"), 1, "nearest to 9 is 1"),
        (("--select", "STAGE=1"), 2, "STAGE"),
        (("-o", "plan.xyz"), 2, ".xyz"),
    ],
)
def test_faults_are_messages(plan_file: str, arguments: tuple[str, ...], code: int, text: str) -> None:
    done = CliRunner().invoke(app, ["show", plan_file, *arguments])
    assert done.exit_code == code, done.output
    assert text in done.output
    assert len(done.output.splitlines()) <= 12


@pytest.mark.parametrize(
    ("text", "filter"),
    [
        ("PP=1,MB=2,PASS=F", where(PP=1, MB=2, PASS="F")),
        ("PP=0-1", where(PP=range(2))),
        (" PP = (0, 1) , MB=...", where(PP=(0, 1), MB=...)),
        ("PP=(1,),MB=(0-1,3)", where(PP=1, MB=(0, 1, 3))),
        ("PASS=(F,B)", where(PASS=("F", "B"))),
        ('PASS="F",path=layers.*', where("layers.*", PASS="F")),
    ],
)
def test_selections_are_filters(plan_file: str, text: str, filter: Filter) -> None:
    assert parsed_filter(text) == filter
    assert run("show", plan_file, "--select", text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "selects nothing.\nhelp: such as PP=0,PASS=F; leave --select out for everything."),
        ("PP=0,PP=1", "PP is given twice.\nhelp: write several as PP=(0,1)."),
        ("PASS=F,PASS=B", "PASS is given twice.\nhelp: write several as PASS=(F,B)."),
        ("PP=1-0", "PP=1-0 is no coordinate.\nhelp: write a number, 0-3, (0,2), or ... for any: PP=0-3."),
        ("MB=-1", "MB=-1 is no coordinate.\nhelp: write a number, 0-3, (0,2), or ... for any: MB=0-3."),
        ("MB=range(4)", "MB=range(4) is no coordinate.\nhelp: write a number, 0-3, (0,2), or ... for any: MB=0-3."),
        ("PP=0,F", "'F' is not of the form key=value.\nhelp: such as PP=0,PASS=F."),
        ("PP=0,", "'' is not of the form key=value.\nhelp: such as PP=0,PASS=F."),
        ("pp=0", "unknown coordinate 'pp'.\nhelp: did you mean 'PP'?"),
        ("PASS=X", "where(PASS='X'): unknown pass.\nhelp: known: B, BI, BW, F, U"),
    ],
)
def test_selections_of_another_form_are_refused(plan_file: str, text: str, message: str) -> None:
    done = CliRunner().invoke(app, ["show", plan_file, "--select", text])
    assert done.exit_code == 2
    assert done.stderr == f"ConfigError: --select {text!r}: {message}\n"


@pytest.mark.parametrize(
    ("source", "arguments", "text"),
    [
        ("plan", ("--costs", "measured"), "a saved plan has no programs to measure"),
        ("tiny", ("--costs", "measured", "--hardware", "h100"), "measured costs are those of this machine"),
        ("plan", ("--costs", "measures"), "did you mean 'measured'?"),
    ],
)
def test_costs_that_cannot_be_had_are_messages(
    plan_file: str, source: str, arguments: tuple[str, ...], text: str
) -> None:
    tiny = Path(__file__).resolve().parents[2] / "configs" / "gpt_tiny.yaml"
    done = CliRunner().invoke(app, ["simulate", plan_file if source == "plan" else str(tiny), *arguments])
    assert done.exit_code == 2, done.output
    assert text in done.output
