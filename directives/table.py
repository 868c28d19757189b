"""A schedule as a table: a row for each rank, a cell for each task, as the text grid prints them."""

import csv
import json
import re
from pathlib import Path

import piper_jax as piper
from piper_jax import where

CELL = re.compile(r"(\d*)(F|BI|BW|B)(\d+)")


@piper.strategy("Table", options={"file": "path of a CSV, JSON or text file with the rows; needed"})
def table(plan, options):
    """Runs what a file lists: `F0 F1 B0`, `2F0` for stage 2, `F1+B0` for an overlap slot, `BI0` and `BW0`."""
    path = Path(options["file"])
    rows = [[_tasks(cell, rank, path) for cell in cells] for rank, cells in enumerate(_rows(path))]
    if len(rows) != options.pipeline_parallel:
        raise piper.DirectiveError(
            f"{path.name} has {len(rows)} rows, but pipeline_parallel={options.pipeline_parallel}.",
            help="write a row for each rank.",
        )
    place, stages = _require_whole(rows, path, options.num_microbatches)
    plan = plan.cut(stages=stages).split(where(), num_microbatches=options.num_microbatches)
    for rank in range(len(rows)):
        for stage in sorted({stage for stage, _ in place}):
            here = tuple(i for i in range(options.num_microbatches) if place[stage, i] == rank)
            plan = plan.place(where(PP=stage, MB=here), group=options.group(rank)) if here else plan
    return plan.order([tuple(where(PP=s, MB=i, PASS=p) for s, p, i in slot) for cells in rows for slot in cells])


def _rows(path):
    """The cells of each row, without idle and continued ticks, and without a name of the row before a bar."""
    if not path.is_file():
        raise piper.DirectiveError(f"there is no table {path}.", help='directive("Table", file="my_schedule.csv").')
    text = path.read_text()
    if path.suffix == ".json":
        loaded = json.loads(text)
        lines = loaded.values() if isinstance(loaded, dict) else loaded
    else:
        lines = csv.reader(line.rpartition("|")[2] for line in text.splitlines() if line.strip())
    rows = [" ".join(line) if isinstance(line, list) else line for line in lines]
    return [[cell for cell in re.sub(r"\+\s+", "+", row).split() if cell not in (".", "=")] for row in rows]


def _tasks(cell, rank, path):
    """``2F1+2B0`` as ((2, "F", 1), (2, "B", 0)); a task without a stage is of the row's own."""
    found = [CELL.fullmatch(task) for task in cell.split("+")]
    if not all(found):
        raise piper.DirectiveError(
            f"{path.name}: row {rank}: {cell!r} is not a task.", help="write F0, B0, BI0, BW0, 2F0 or F1+B0."
        )
    return tuple((int(m[1] or rank), m[2], int(m[3])) for m in found)


def _require_whole(rows, path, microbatches):
    """The rank of each stage and microbatch, and the number of stages; every task is there once."""
    row_of = {}
    for rank, cells in enumerate(rows):
        for task in (task for slot in cells for task in slot):
            if task in row_of:
                raise piper.DirectiveError(
                    f"{path.name}: {_text(task)} is in row {row_of[task]} and again in row {rank}.",
                    help="list each task once.",
                )
            row_of[task] = rank
    stages = max((stage for stage, _, _ in row_of), default=0) + 1
    place = {}
    for stage in range(stages):
        for i in range(microbatches):
            split = (stage, "BI", i) in row_of or (stage, "BW", i) in row_of
            needed = [(stage, name, i) for name in (("F", "BI", "BW") if split else ("F", "B"))]
            missing = [_text(task) for task in needed if task not in row_of]
            ranks = {row_of[task] for task in needed if task in row_of}
            if missing or len(ranks) > 1:
                what = f"{missing[0]} is missing" if missing else f"F and B of stage {stage}, microbatch {i} are apart"
                raise piper.DirectiveError(
                    f"{path.name}: {what}.", help="list F and B, or BI and BW, of every microbatch in one row."
                )
            place[stage, i] = ranks.pop()
    extra = [_text(task) for task in row_of if task[2] >= microbatches]
    if extra:
        raise piper.DirectiveError(
            f"{path.name}: {extra[0]} is beyond num_microbatches={microbatches}.",
            help=f"use num_microbatches={max(task[2] for task in row_of) + 1}.",
        )
    return place, stages


def _text(task):
    return f"{task[1]}[PP={task[0]},MB={task[2]}]"
