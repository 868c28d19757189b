"""A schedule as a table: a row for each rank, a cell for each task, as the text grid prints them."""

import csv
import json
import os
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
    if not isinstance(options["file"], str | os.PathLike):
        raise piper.DirectiveError(f"Table: file={options['file']!r} is not a path.", help='file="my_schedule.csv".')
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


def _rows(file):
    """The cells of each rank, without idle and continued ticks, updates, and the name of the row."""
    path = Path(file)
    text = _text_of(path)
    named = _json_rows(path.name, text) if path.suffix.lower() == ".json" else _lines(path.name, text)
    rows = [(name, re.sub(r"\s*\+\s*", "+", row).split()) for name, row in named]
    return [[cell for cell in row if cell not in (".", "=", "U")] for row in _by_rank(path.name, rows)]


def _text_of(path):
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = f" ({error.strerror})" if path.exists() and isinstance(error, OSError) else ""
        raise piper.DirectiveError(
            f"there is no table {path}{reason}.", help="give the path of a CSV, JSON or text file."
        ) from None
    text = data.decode("utf-8-sig", errors="replace")
    if "\0" in text or "\ufffd" in text:
        raise piper.DirectiveError(f"{path.name} is not UTF-8 text.", help="save it as text in UTF-8.")
    return text


def _lines(name, text):
    """Names (None without a bar) and rows of a text or CSV file; lines from #, and the heading of a grid, are none."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    if any("|" in line for line in lines):  # the heading of a text grid has no name
        lines = [line for line in lines if "|" in line or "stages=" not in line]
    separator = ";" if any(";" in line for line in lines) else ","
    try:
        rows = list(csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise piper.DirectiveError(f"{name} is not CSV: {error}.", help="close every quote, or use none.") from None
    return [_named(" ".join(row)) for row in rows if any(cell.strip() for cell in row)]


def _json_rows(file, text):
    """As ``_lines`` of a JSON file; an object is read as pairs, so that a name which is there twice is seen."""
    try:
        loaded = json.loads(text, object_pairs_hook=tuple)
        if not isinstance(loaded, tuple | list):
            raise TypeError(f"{type(loaded).__name__} in place of a list")
        pairs = loaded if isinstance(loaded, tuple) else [(None, row) for row in loaded]
        if wrong := [cell for _, row in pairs if not isinstance(row, str) for cell in row if not isinstance(cell, str)]:
            raise TypeError(f"{wrong[0]!r} in place of a text")
        rows = [(name, _named(row if isinstance(row, str) else " ".join(row))) for name, row in pairs]
    except (ValueError, TypeError, RecursionError) as error:
        raise piper.DirectiveError(
            f"{file} is not a list of rows: {error}", help='write [["F0", "B0"], ["F0", "B0"]].'
        ) from None
    return [(inner if name is None else name, row) for name, (inner, row) in rows]


def _named(line):
    name, _, row = line.rpartition("|")
    return name.strip() or None, row


def _by_rank(file, rows):
    """Rows in the order of the numbers with which their names end; in that of the file where none has a name."""
    if all(name is None for name, _ in rows):
        return [row for _, row in rows]
    ranks = [int(found[0]) if (found := re.search(r"[0-9]{1,9}$", name or "")) else None for name, _ in rows]
    for index, ((name, _), rank) in enumerate(zip(rows, ranks, strict=True)):
        if rank is None:
            fault = f"row {index} has no name, others have" if name is None else f"row {name!r} does not say its rank"
        elif rank in ranks[:index]:
            fault = f"row {name!r} is rank {rank} again"
        elif rank >= len(rows):
            fault = f"row {name!r} is rank {rank} of {len(rows)}"
        else:
            continue
        fix = f"end the names with 0 to {len(rows) - 1}, each once." if len(rows) > 1 else "end the name with 0."
        raise piper.DirectiveError(f"{file}: {fault}.", help=fix)
    return [row for _, (_, row) in sorted(zip(ranks, rows, strict=True), key=lambda pair: pair[0])]


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
