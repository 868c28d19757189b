"""A schedule as a table: a row for each rank, a cell for each task, as the text grid prints them."""

import csv
import difflib
import json
import os
import re
from pathlib import Path

import piper_jax as piper
from piper_jax import where

IDLE = (".", "=", "U")  # an idle tick, a task that goes on, an update
FORMS = "Write F0, B0, BI0, BW0, 2F0 or F2.0 (stage 2), F1+B0, or . for idle; # begins a comment."


@piper.strategy("Table", options={"file": "path of a CSV, JSON or text file with the rows; needed"})
def table(plan, options):
    """Runs what a file lists: `F0 F1 B0`, `2F0` or `F2.0` for stage 2, `F1+B0` for an overlap slot, `BI0` and `BW0`."""
    if options.get("file") is None:
        raise piper.DirectiveError("Table needs file.", help='directive("Table", file="my_schedule.csv").')
    if not isinstance(options["file"], str | os.PathLike):
        raise piper.DirectiveError(f"Table: file={options['file']!r} is not a path.", help='file="my_schedule.csv".')
    path, microbatches = Path(options["file"]), options.num_microbatches
    rows = _rows(path)
    slots = [slot for rank, row in enumerate(rows) for slot in _slots(path.name, rank, row, microbatches)]
    if len(rows) != options.pipeline_parallel:
        count = f"{len(rows)} row{'s' * (len(rows) != 1)}"
        raise _fault(
            f"{path.name} has {count}, but pipeline_parallel={options.pipeline_parallel}.", "write a row for each rank."
        )
    cells = _cells(path.name, slots)
    stages = _num_stages(cells)
    rank_of = {(s, i): _rank(cells, s, i, path.name) for s in range(stages) for i in range(microbatches)}
    try:
        plan = plan.cut(stages=stages)
    except piper.DirectiveError as error:
        raise _in_cells(error, [_first(cells, stages - 1)]) from None
    plan = plan.split(where(), num_microbatches=microbatches)
    for stage in range(stages):
        for rank in sorted({rank_of[stage, i] for i in range(microbatches)}):
            here = tuple(i for i in range(microbatches) if rank_of[stage, i] == rank)
            plan = plan.place(where(PP=stage, MB=here), group=options.group(rank))
    try:
        return plan.order([tuple(where(PP=s, MB=i, PASS=p) for s, p, i in tasks) for _, _, tasks in slots])
    except piper.DirectiveError as error:
        raise _in_cells(error, [cells[task][1] for task in _tasks_of(error) if task in cells]) from None


# -- faults -----------------------------------------------------------------------------------------
def _fault(what, fix):
    """An error that names its place in the table, so that none other is put before it."""
    return piper.DirectiveError(what, help=fix, place=what.partition(":")[0])


def _in_cells(error, cells):
    """What the directives found wrong, with the cells that say so."""
    first, *others = dict.fromkeys(cells)
    listed = " and ".join((first, *map(_short, others)))
    return piper.DirectiveError(f"{listed}: {error.what}", detail=error.detail, help=error.help, place=listed)


def _tasks_of(error):
    """The tasks that an error of ``order`` is about: both ends of the step that closes a cycle, or its node."""
    cycle = error.data.get("cycle", ())
    nodes = [cycle[-1], cycle[0]] if cycle else [error.data.get("node")]
    return [(node.PP, node.PASS, node.MB) for node in nodes if node is not None]


# -- reading ----------------------------------------------------------------------------------------
def _rows(path):
    """For each rank its cells with their numbers in the file, both from 0."""
    text = _text_of(path)
    named = _json_rows(path.name, text) if path.suffix.lower() == ".json" else _lines(path.name, text)
    return _by_rank(path.name, named)


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
        raise _fault(f"{path.name} is not UTF-8 text.", "save it as text in UTF-8.")
    return text


def _lines(name, text):
    """Names (None without a bar) and cells of a text or CSV file, without comments and the heading of a grid."""
    lines = [re.sub(r"^\s*#.*|#[^|]*$", "", line) for line in text.splitlines()]
    if any("|" in line for line in lines):  # the heading of a text grid has no name
        lines = [line for line in lines if "|" in line or "stages=" not in line]
    separator = ";" if any(";" in line for line in lines) else ","
    try:
        rows = list(csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise _fault(f"{name} is not CSV: {error}.", "close every quote, or use none.") from None
    return [_named(row) for row in rows if any(cell.strip() for cell in row)]


def _json_rows(file, text):
    """As ``_lines`` of a JSON file; an object is read as pairs, so that a name which is there twice is seen."""
    try:
        loaded = json.loads(text, object_pairs_hook=tuple)
        if not isinstance(loaded, tuple | list):
            raise TypeError(f"{type(loaded).__name__} in place of a list")
        pairs = loaded if isinstance(loaded, tuple) else [(None, row) for row in loaded]
        for number, (_, row) in enumerate(pairs):
            if not isinstance(row, str | list):
                raise TypeError(f"row {number}: {type(row).__name__} in place of a list")
            if wrong := [(k, cell) for k, cell in enumerate(row) if not isinstance(cell, str)]:
                raise TypeError(f"row {number}, cell {wrong[0][0]}: {wrong[0][1]!r} in place of a text")
        rows = [(name, _named([row] if isinstance(row, str) else row)) for name, row in pairs]
    except (ValueError, TypeError, RecursionError) as error:
        raise _fault(f"{file} is not a list of rows: {error}", 'write [["F0", "B0"], ["F0", "B0"]].') from None
    return [(inner if name is None else name, row) for name, (inner, row) in rows]


def _named(cells):
    """The name before the last bar (None without one), and the texts after it with their numbers in the row.

    Numbers are those of the columns, or of the words where a row is a single column.
    """
    bar = max((k for k, cell in enumerate(cells) if "|" in cell), default=-1)
    name, _, after = cells[bar].rpartition("|") if bar >= 0 else ("", "", "")
    texts = [(k, after if k == bar else cell) for k, cell in enumerate(cells) if k >= bar]
    found = [(k, j, word) for k, cell in texts for j, word in enumerate(re.sub(r"\s*\+\s*", "+", cell).split())]
    name = " ".join((*cells[: max(bar, 0)], name)).strip() or None
    return name, [(k if len(cells) > 1 else j, word) for k, j, word in found]


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
        raise _fault(f"{file}: {fault}.", fix)
    return [row for _, (_, row) in sorted(zip(ranks, rows, strict=True), key=lambda pair: pair[0])]


# -- tasks ------------------------------------------------------------------------------------------
TASK = r"(\d{0,9})(F|BI?|BW|I|W)(\d{1,9})|(F|BI?|BW|I|W)(\d{1,9})\.(\d{1,9})"


def _slots(file, rank, row, microbatches):
    """The slots of a row with their cells: ``2F1+2B0`` is ((2, "F", 1), (2, "B", 0)); F1 is of the rank's stage."""
    full, slots = {"I": "BI", "W": "BW"}, []
    for number, word in row:
        found = [re.fullmatch(TASK, task) for task in word.split("+")]
        cell = f"{file}: row {rank}, cell {number} ({word})"
        if word in IDLE:
            continue
        if not all(found):
            raise _no_task(file, rank, row, number, word)
        tasks = [(m[1] or m[5] or rank, m[2] or m[4], m[3] or m[6]) for m in found]
        tasks = tuple((int(stage), full.get(name, name), int(microbatch)) for stage, name, microbatch in tasks)
        for stage, name, microbatch in tasks:
            if microbatch >= microbatches:
                raise _fault(
                    f"{cell}: {_text(stage, name, microbatch)} is beyond num_microbatches={microbatches}.",
                    f"did you mean {name}{microbatches - 1}, the last? Or use num_microbatches={microbatch + 1}.",
                )
        slots.append((rank, cell, tasks))
    return slots


def _no_task(file, rank, row, number, word):
    """The error for a cell that is none: in a row of headings, before the tasks of a row, or among them."""
    words = [other for _, other in row]
    legal = [f"{name}{i}" for name in ("F", "B", "BI", "BW") for i in re.findall(r"\d+", word) or ("0",)]
    near = difflib.get_close_matches(word.upper(), legal, n=1, cutoff=0.6)
    if len(words) > 1 and not any(re.match(r"\d*[FBIW]\w*\d", other.upper()) for other in words):
        fix = f"columns have no names; put # before these. {FORMS}"
        return _fault(f"{file}: row {rank} holds no task, but {', '.join(words[:4])}.", fix)
    if word.isdigit() and word == words[0]:
        fix = f"end the name of a row with a bar: {word} | {' '.join(words[1:3])}."
    else:
        fix = f"did you mean {near[0]}? {FORMS}" if near else FORMS
    return _fault(f"{file}: row {rank}, cell {number}: {word!r} is not a task.", fix)


def _cells(file, slots):
    """The row and the cell of each task, which is there once."""
    cells = {}
    for rank, cell, tasks in slots:
        for task in tasks:
            if task in cells:
                raise _fault(f"{cell}: {_text(*task)} is there already, in {_short(cells[task][1])}.", "list it once.")
            cells[task] = rank, cell
    if not cells:
        raise _fault(f"{file}: there is no task in it.", FORMS)
    return cells


def _num_stages(cells):
    """Stages are numbered from 0 without gaps."""
    stages = {stage for stage, _, _ in cells}
    last = max(stages)
    gap = next((stage for stage in range(last) if stage not in stages), None)
    if gap is not None:
        raise _fault(
            f"{_first(cells, last)}: it is of stage {last}, but no cell is of stage {gap}.",
            f"list F and B of stages 0 to {last}, or write another stage here.",
        )
    return last + 1


def _rank(cells, stage, microbatch, file):
    """The row of all passes of one stage for one microbatch."""
    halved = any((stage, half, microbatch) in cells for half in ("BI", "BW"))
    needed = [(stage, p, microbatch) for p in (("F", "BI", "BW") if halved else ("F", "B"))]
    missing = [task for task in needed if task not in cells]
    ranks = {cells[task][0]: cells[task][1] for task in needed if task in cells}
    if missing:
        others = sorted({rank for (s, _, _), (rank, _) in cells.items() if s == stage})
        fault = f"{file}: row {others[0]}: {_text(*missing[0])} is missing"
    elif halved and (stage, "B", microbatch) in cells:
        fault = f"{cells[stage, 'B', microbatch][1]}: {_text(stage, 'B', microbatch)} is there whole and in halves"
    elif len(ranks) > 1:
        fault = f"{', '.join(ranks.values())}: F and B of stage {stage}, microbatch {microbatch} are on different ranks"
    else:
        return next(iter(ranks))
    fix = "list F and B, or F, BI and BW, of every microbatch in one row"
    fewer = f"; or use num_microbatches={microbatch}" if len(missing) == len(needed) and microbatch else ""
    raise _fault(f"{fault}.", f"{fix}{fewer}.")


def _first(cells, stage):
    return next(cell for (s, _, _), (_, cell) in cells.items() if s == stage)


def _short(cell):
    """The cell without the name of the file."""
    return cell.partition(": ")[2]


def _text(stage, name, microbatch):
    return f"{name}[PP={stage},MB={microbatch}]"
