"""A schedule as a table: a row for each rank, a cell for each task, as the text grid prints them."""

import json
import re
from pathlib import Path

import piper_jax as piper
from piper_jax import where

FORMS = "write F0, B0, BI0, BW0, 2F0 or F2.0 (stage 2), or F1+B0."


@piper.strategy("Table", options={"file": "path of a CSV, JSON or text file with the rows; needed"})
def table(plan, options):
    """Runs what a file lists: `F0 F1 B0`, `2F0` or `F2.0` for stage 2, `F1+B0` for an overlap slot, `BI0` and `BW0`."""
    if options.get("file") is None:
        raise piper.DirectiveError("Table needs file.", help='directive("Table", file="my_schedule.csv").')
    path, microbatches = Path(options["file"]), options.num_microbatches
    rows = [[_tasks(cell, rank, path.name) for cell in cells] for rank, cells in enumerate(_rows(path))]
    if len(rows) != options.pipeline_parallel:
        raise piper.DirectiveError(
            f"{path.name} has {len(rows)} rows, but pipeline_parallel={options.pipeline_parallel}.",
            help="write a row for each rank.",
        )
    row_of = _row_of(rows, path.name, microbatches)
    stages = max(stage for stage, _, _ in row_of) + 1
    rank_of = {(s, i): _rank(row_of, s, i, path.name) for s in range(stages) for i in range(microbatches)}
    plan = plan.cut(stages=stages).split(where(), num_microbatches=microbatches)
    for stage in range(stages):
        for rank in sorted({rank_of[stage, i] for i in range(microbatches)}):
            here = tuple(i for i in range(microbatches) if rank_of[stage, i] == rank)
            plan = plan.place(where(PP=stage, MB=here), group=options.group(rank))
    return plan.order([tuple(where(PP=s, MB=i, PASS=p) for s, p, i in slot) for cells in rows for slot in cells])


def _rows(path):
    """The cells of each row, without idle and continued ticks, and without the name of a row before its bar."""
    if not path.is_file():
        raise piper.DirectiveError(f"there is no table {path}.", help="give the path of a CSV, JSON or text file.")
    text = path.read_text()
    lines = _json_rows(path.name, text) if path.suffix == ".json" else text.replace(",", " ").splitlines()
    rows = [re.sub(r"\+\s+", "+", line.rpartition("|")[2]).split() for line in lines if line.strip()]
    return [[cell for cell in row if cell not in (".", "=")] for row in rows]


def _json_rows(name, text):
    try:
        loaded = json.loads(text)
        rows = list(loaded.values()) if isinstance(loaded, dict) else list(loaded)
        return [row if isinstance(row, str) else " ".join(row) for row in rows]
    except (ValueError, TypeError) as error:
        raise piper.DirectiveError(
            f"{name} is not a list of rows: {error}", help='write [["F0", "B0"], ["F0", "B0"]].'
        ) from None


def _tasks(cell, rank, name):
    """``2F1+2B0`` as ((2, "F", 1), (2, "B", 0)); a task without a stage is of the stage with the number of the row."""
    found = [re.fullmatch(r"(\d*)(F|BI?|BW|I|W)(\d+)|(F|BI?|BW|I|W)(\d+)\.(\d+)", task) for task in cell.split("+")]
    if not all(found):
        raise piper.DirectiveError(f"{name}: row {rank}: {cell!r} is not a task.", help=FORMS)
    full = {"I": "BI", "W": "BW"}
    return tuple((int(m[1] or m[5] or rank), full.get(m[2] or m[4], m[2] or m[4]), int(m[3] or m[6])) for m in found)


def _row_of(rows, name, microbatches):
    """The row of each task, which is there once."""
    row_of = {}
    for rank, task in [(rank, task) for rank, cells in enumerate(rows) for slot in cells for task in slot]:
        if task in row_of:
            raise piper.DirectiveError(
                f"{name}: {_text(*task)} is in row {row_of[task]} and again in row {rank}.", help="list each task once."
            )
        row_of[task] = rank
    last = max((task[2] for task in row_of), default=-1)
    beyond = [task for task in row_of if task[2] >= microbatches]
    if beyond:
        raise piper.DirectiveError(
            f"{name}: {_text(*beyond[0])} is beyond num_microbatches={microbatches}.",
            help=f"use num_microbatches={last + 1}.",
        )
    if not row_of:
        raise piper.DirectiveError(f"{name} lists no task.", help=FORMS)
    return row_of


def _rank(row_of, stage, microbatch, name):
    """The row of all passes of one stage for one microbatch."""
    halved = any((stage, half, microbatch) in row_of for half in ("BI", "BW"))
    needed = [(stage, p, microbatch) for p in (("F", "BI", "BW") if halved else ("F", "B"))]
    missing = [task for task in needed if task not in row_of]
    ranks = {row_of[task] for task in needed if task in row_of}
    if missing:
        fault = f"{_text(*missing[0])} is missing"
    elif halved and (stage, "B", microbatch) in row_of:
        fault = f"{_text(stage, 'B', microbatch)} is there whole and in halves"
    elif len(ranks) > 1:
        fault = f"F and B of stage {stage}, microbatch {microbatch} are on different ranks"
    else:
        return ranks.pop()
    fix = "list F and B, or F, BI and BW, of every microbatch in one row"
    fewer = f"; or use num_microbatches={microbatch}" if len(missing) == len(needed) and microbatch else ""
    raise piper.DirectiveError(f"{name}: {fault}.", help=f"{fix}{fewer}.")


def _text(stage, name, microbatch):
    return f"{name}[PP={stage},MB={microbatch}]"
