"""Schedules as tables: what they may hold, and how faults in them are named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from traced_dags import chain

from piper_jax import DirectiveError, Strategy, directive, simulate
from piper_jax.planning import Plan
from piper_jax.visualization.grid import grid_text

ONE_F_ONE_B = [["F0", "F1", "B0", "F2", "B1", "B2"], ["F0", "B0", "F1", "B1", "F2", "B2"]]


def strategy_of(file: Path, ranks: int = 2, microbatches: int = 3) -> Strategy:
    return Strategy(
        pipeline_parallel=ranks, num_microbatches=microbatches, directives=(directive("Table", file=str(file)),)
    )


def planned(file: Path, text: str, **counts: int) -> Plan:
    file.write_text(text)
    return chain(4, rows=24).apply(strategy_of(file, **counts)).check()


def fault(tmp_path: Path, text: str, **counts: int) -> str:
    with pytest.raises(DirectiveError) as caught:
        planned(tmp_path / "mine.csv", text, **counts)
    return str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".csv", "\n".join(",".join(row) for row in ONE_F_ONE_B)),
        (".txt", "\n".join(" ".join(row) for row in ONE_F_ONE_B) + "\n\n"),
        (".json", json.dumps(ONE_F_ONE_B)),
        (".json", json.dumps({"g0": " ".join(ONE_F_ONE_B[0]), "g1": " ".join(ONE_F_ONE_B[1])})),
    ],
)
def test_a_table_gives_the_plan_of_the_named_schedule(tmp_path, suffix, text):
    plan = planned(tmp_path / f"mine{suffix}", text)
    named = chain(4, rows=24).apply(Strategy(pipeline_parallel=2, num_microbatches=3))
    assert plan.dag == named.dag


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches"),
    [("Interleaved1F1B", 2, 4), ("ZBV", 2, 4), ("DualPipeV", 2, 4), ("DualPipe", 4, 8)],
)
def test_the_grid_of_a_plan_is_a_table_of_the_same_plan(tmp_path, schedule, ranks, microbatches):
    options = {"pipeline_parallel": ranks, "num_microbatches": microbatches}
    plan = chain(4, rows=24).apply(Strategy(**options, directives=(directive(schedule),)))
    again = planned(tmp_path / "grid.txt", grid_text(simulate(plan)), ranks=ranks, microbatches=microbatches)
    for group in plan.groups:
        assert [s for s in again.dag.slots if s.group == group] == [s for s in plan.dag.slots if s.group == group]


def test_stages_are_written_before_the_pass_or_before_the_microbatch(tmp_path):
    """``2F0`` and ``I`` and ``W`` as in torch.distributed.pipelining, ``F2.0`` as printed plans have it."""
    one = planned(tmp_path / "one.csv", "0F0 3F0 3I0 3W0 0B0\n1F0 2F0 2B0 1B0", microbatches=1)
    other = planned(tmp_path / "other.csv", "F0.0 F3.0 BI3.0 BW3.0 B0.0\nF1.0 F2.0 B2.0 B1.0", microbatches=1)
    assert one.dag == other.dag
    assert [f"{n.PASS}{n.PP}" for slot in one.dag.slots[:5] for n in slot.nodes] == ["F0", "F3", "BI3", "BW3", "B0"]


def test_a_missing_microbatch_is_named(tmp_path):
    text = "F0 F1 B0 B1\nF0 B0 F1 B1"
    assert fault(tmp_path, text) == (
        "mine.csv: row 0: F[PP=0,MB=2] is missing.\n"
        "help: list F and B, or F, BI and BW, of every microbatch in one row; or use num_microbatches=2."
    )


def test_a_missing_half_of_a_backward_is_named(tmp_path):
    assert "BW[PP=1,MB=1] is missing" in fault(tmp_path, "F0 F1 B0 B1\nF0 F1 B0 BI1", microbatches=2)


def test_a_repeated_task_is_named(tmp_path):
    text = "F0 F1 F0 B0 B1\nF0 B0 F1 B1"
    assert fault(tmp_path, text, microbatches=2) == (
        "mine.csv: row 0, cell 2 (F0): F[PP=0,MB=0] is there already, in row 0, cell 0 (F0).\nhelp: list it once."
    )


def test_a_backward_that_is_whole_and_halved_is_named(tmp_path):
    text = "F0 B0 BI0 BW0\nF0 B0"
    assert "B[PP=0,MB=0] is there whole and in halves" in fault(tmp_path, text, microbatches=1)


def test_a_microbatch_beyond_the_last_is_named(tmp_path):
    text = "F0 F1 B0 B1\nF0 B0 F1 B1"
    assert fault(tmp_path, text, microbatches=1) == (
        "mine.csv: row 0, cell 1 (F1): F[PP=0,MB=1] is beyond num_microbatches=1.\n"
        "help: did you mean F0, the last? Or use num_microbatches=2."
    )


def test_a_deadlock_is_printed(tmp_path):
    text = fault(tmp_path, "F0 B0 F1 B1\n. F0 F1 B0 B1", microbatches=2)
    assert text.startswith("mine.csv: row 1, cell 2 (F1) and row 1, cell 3 (B0): order[4]: F[PP=1,MB=1]")
    assert "closes a cycle" in text
    assert "F[PP=0,MB=1]" in text
    assert "(this directive)" in text


def test_forward_and_backward_apart_are_named(tmp_path):
    text = "0F0 1B0\n1F0 0B0"
    assert "stage 0, microbatch 0 are on different ranks" in fault(tmp_path, text, microbatches=1)


@pytest.mark.parametrize("cell", ["G0", "F", "F0B0", "U0", "F0+", "-F1", "1F2.0", "F.0"])
def test_what_is_no_task_is_named(tmp_path, cell):
    assert f"mine.csv: row 1, cell 1: {cell!r} is not a task" in fault(tmp_path, f"F0 B0\nF0 {cell}", microbatches=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rank,t0,t1\n0,F0,B0\n1,F0,B0",
            "mine.csv: row 0 holds no task, but rank, t0, t1.\nhelp: columns have",
        ),
        (
            "0,F0,B0\n1,F0,B0",
            "mine.csv: row 0, cell 0: '0' is not a task.\nhelp: end the name of a row with a bar",
        ),
        ("F0,,f_0\nF0,B0", "mine.csv: row 0, cell 2: 'f_0' is not a task.\nhelp: did you mean F0? Write F0, B0, "),
        ("F0,B0\nF0,B0,4F0", "mine.csv: row 1, cell 2 (4F0): it is of stage 4, but no cell is of stage 2.\n"),
        ("F0,B0,2F0,2B0,4F0,4B0\nF0,B0,3F0,3B0", "mine.csv: row 0, cell 4 (4F0): cut[0]: the model has 4 units"),
    ],
)
def test_rows_and_cells_are_named(tmp_path, text, message):
    assert fault(tmp_path, text, microbatches=1).startswith(message)


def test_rows_are_ranks(tmp_path):
    assert "has 1 row, but pipeline_parallel=2" in fault(tmp_path, "F0 B0", microbatches=1)


def test_a_file_that_is_not_there_or_not_json(tmp_path):
    with pytest.raises(DirectiveError, match="there is no table"):
        chain(2).apply(strategy_of(tmp_path / "none.csv"))
    with pytest.raises(DirectiveError, match="needs file"):
        chain(2).apply(Strategy(pipeline_parallel=2, directives=(directive("Table"),)))
    (tmp_path / "bad.json").write_text("[[")
    with pytest.raises(DirectiveError, match=r"bad\.json is not a list of rows"):
        chain(2).apply(strategy_of(tmp_path / "bad.json"))
    (tmp_path / "bad.json").write_text("[1, 2]")
    with pytest.raises(DirectiveError, match=r"bad\.json is not a list of rows"):
        chain(2).apply(strategy_of(tmp_path / "bad.json"))


# -- files as others write them ----------
def same(plan: Plan) -> bool:
    return plan.dag == chain(4, rows=24).apply(Strategy(pipeline_parallel=2, num_microbatches=3)).dag


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("quoted.csv", '"F0","F1","B0",F2,B1,B2\n"F0", "B0", "F1", "B1", "F2", "B2"'),
        ("mark.csv", "\ufeffF0,F1,B0,F2,B1,B2\nF0,B0,F1,B1,F2,B2"),
        ("semicolons.csv", "F0;F1;B0;F2;B1;B2;\r\nF0;B0;F1;B1;F2;B2;\r\n;;;;;;\r\n"),
        ("comments.CSV", '# mine, by hand; "\nF0,F1,B0,F2,B1,B2,U\n  # rank 1\nF0,B0,F1,B1,F2,B2,U\n'),
        ("remarks.csv", 'F0,F1,B0,F2,B1,B2,# rank 0, "mine"\nF0,B0,F1,B1,F2,B2 # rank 1'),
        ("names.txt", "rank 1 | F0 B0 F1 B1 F2 B2\nrank 0 | F0 F1 B0 F2 B1 B2"),
        ("names.JSON", json.dumps({"rank1": " ".join(ONE_F_ONE_B[1]), "rank0": ONE_F_ONE_B[0]})),
    ],
)
def test_a_table_is_read_as_spreadsheets_and_people_write_it(tmp_path, file, text):
    assert same(planned(tmp_path / file, text))


def test_an_overlap_slot_may_have_spaces(tmp_path):
    spaced = planned(tmp_path / "one.csv", "F0,F1,F2 + B0,B1,B2\nF0,F1 +B0,F2+ B1,B2")
    assert spaced.dag == planned(tmp_path / "two.csv", "F0,F1,F2+B0,B1,B2\nF0,F1+B0,F2+B1,B2").dag


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"a0": "F0 B0", "a2": "F0 B0"}', "mine.json: row 'a2' is rank 2 of 2.\nhelp: NAMES"),
        ('{"a0": "F0 B0", "b0": "F0 B0"}', "mine.json: row 'b0' is rank 0 again.\nhelp: NAMES"),
        ('{"a0": "F0 B0", "a0": "F0 B0"}', "mine.json: row 'a0' is rank 0 again.\nhelp: NAMES"),
        ('{"a0": "F0 B0", "last": "F0 B0"}', "mine.json: row 'last' does not say its rank.\nhelp: NAMES"),
        ('["0 | F0 B0", "F0 B0"]', "mine.json: row 1 has no name, others have.\nhelp: NAMES"),
    ],
)
def test_names_of_rows_are_ranks(tmp_path, rows, message):
    with pytest.raises(DirectiveError) as caught:
        planned(tmp_path / "mine.json", rows, microbatches=1)
    assert str(caught.value) == message.replace("NAMES", "end the names with 0 to 1, each once.")


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("a.csv", "F0,B0\nF0,B0".encode("utf-16"), "a.csv is not UTF-8 text.\nhelp: save it as text in UTF-8."),
        ("a.csv", b"\x00\x01\x02", "a.csv is not UTF-8 text.\nhelp: save it as text in UTF-8."),
        ("a.csv", b'"F0,B0', "a.csv is not CSV: unexpected end of data.\nhelp: close every quote, or use none."),
        ("a.json", b"[" * 100_000, "a.json is not a list of rows: maximum recursion depth"),
        ("a.json", b"{", "a.json is not a list of rows: Expecting property name"),
        ("a.json", b"3", "a.json is not a list of rows: int in place of a list"),
        ("a.json", b'[["F0", 1]]', "a.json is not a list of rows: row 0, cell 1: 1 in place of a text"),
        ("a.json", b"{}", "a.json has 0 rows, but pipeline_parallel=2.\nhelp: write a row for each rank."),
        ("a.json", b'"F0 B0"', "a.json is not a list of rows: str in place of a list"),
    ],
)
def test_what_is_no_table_names_the_file(tmp_path, file, data, message):
    (tmp_path / file).write_bytes(data)
    with pytest.raises(DirectiveError) as caught:
        chain(4).apply(strategy_of(tmp_path / file))
    assert str(caught.value).startswith(message)


def test_a_file_that_is_no_path(tmp_path):
    with pytest.raises(DirectiveError) as caught:
        chain(4).apply(Strategy(pipeline_parallel=2, directives=(directive("Table", file=3),)))
    at = r"directive\('Table', file=3\) at test_strategies_tables\.py:\d+: "
    assert re.fullmatch(at + r'Table: file=3 is not a path\.\nhelp: file="my_schedule\.csv"\.', str(caught.value))
    with pytest.raises(DirectiveError, match=r"there is no table .* \(Is a directory\)"):
        chain(4).apply(strategy_of(tmp_path))
