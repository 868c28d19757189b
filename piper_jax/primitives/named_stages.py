"""Stages given by module paths: ``["embed, layers.0-2", "layers.3-5, head"]``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from piper_jax.errors import DirectiveError
from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import under


def units_of_stages(dag: Dag, stages: Sequence[str]) -> list[list[int]]:
    """The units of each stage, given as text: module paths or patterns, ``layers.0-2`` for neighbours, with commas.

    A unit is found by the modules in its name and by the parameters that it alone reads.

    Raises:
      DirectiveError: a path of no unit, or a unit of no stage or of several.
    """
    paths = _paths_of_units(dag)
    found: list[list[int]] = []
    for number, text in enumerate(stages):
        words = [word for part in text.split(",") if part.strip() for word in _expanded(part.strip())]
        for word in words:
            if not any(under((word,), own) for own in paths.values()):
                known = dict.fromkeys(path for own in paths.values() for path in own)
                near = difflib.get_close_matches(word, known, n=3, cutoff=0.3) or list(known)[:3]
                raise DirectiveError(
                    f"stages[{number}]={text!r}: no unit has {word!r}.", help=f"such as {', '.join(near)}."
                )
        found.append([unit for unit, own in paths.items() if under(tuple(words), own)])
    for unit, own in paths.items():
        places = [number for number, members in enumerate(found) if unit in members]
        if len(places) != 1:
            where = f"stages {' and '.join(map(str, places))}" if places else "no stage"
            raise DirectiveError(
                f"unit {unit} ({own[0]}) is in {where}.", help="list every unit in one stage; print(plan) shows them."
            )
    return found


def _paths_of_units(dag: Dag) -> dict[int, tuple[str, ...]]:
    """For each unit its name, the modules in it, and the paths of the leaves that it alone reads."""
    readers: dict[str, set[int | None]] = {}
    for op in dag.ops.values():
        for bucket in op.reads:
            readers.setdefault(bucket, set()).add(op.PP)
    found: dict[int, dict[str, None]] = {}
    for op in dag.ops.values():
        if op.PP is None:
            continue
        names = [op.name, *re.sub(r"#\d+", "", op.name).split("+")]
        own = (dag.buckets[b] for b in op.reads if len(readers[b]) == 1 and b in dag.buckets)
        leaves = [leaf.path.removeprefix("params.") for bucket in own for leaf in bucket.leaves]
        found.setdefault(op.PP, {}).update(dict.fromkeys([*names, *leaves]))
    return {unit: tuple(found[unit]) for unit in sorted(found)}


def _expanded(word: str) -> list[str]:
    """``layers.0-2`` as ``layers.0``, ``layers.1``, ``layers.2``."""
    match = re.fullmatch(r"(.*\D|)(\d+)-(\d+)", word)
    if match is None:
        return [word]
    return [f"{match[1]}{number}" for number in range(int(match[2]), int(match[3]) + 1)]
