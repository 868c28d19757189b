"""Stages given by module paths: ``["embed, layers.0-2", "layers.3-5, head"]``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from piper_jax.errors import DirectiveError, nearest
from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import under


@dataclass(frozen=True, slots=True)
class _Unit:
    """A unit, and the paths by which it is found: its name, the modules in it, the leaves that it alone reads."""

    name: str
    paths: tuple[str, ...]
    owns: bool


def units_of_stages(dag: Dag, stages: Sequence[str]) -> list[list[int]]:
    """The units of each stage, given as text: module paths or patterns, ``layers.0-2`` for neighbours, with commas.

    A unit that no stage names and that has no parameters of its own goes with the unit before it. One that reads what
    others read too, such as a tied embedding, may be named in each of their stages, and is in the first.

    Raises:
      DirectiveError: a path of no unit, a unit of no stage or of several, or stages that are not in order.
    """
    units = _units(dag)
    found = [_members(units, f"stages[{number}]={text!r}", text) for number, text in enumerate(stages)]
    stage_of: dict[int, int] = {}
    before = 0
    for number, unit in units.items():
        places = [stage for stage, members in enumerate(found) if number in members]
        if len(places) != 1 and unit.owns:
            where = f"stages {' and '.join(map(str, places))}" if places else "no stage"
            raise DirectiveError(
                f"unit {number} ({unit.name}) is in {where}.",
                help="list every unit in one stage; print(plan) shows them.",
            )
        before = stage_of[number] = places[0] if places else before
    _require_order(units, stage_of)
    made = [[unit for unit, stage in stage_of.items() if stage == number] for number in range(len(stages))]
    for number, text in enumerate(stages):
        if not made[number]:
            raise DirectiveError(
                f"stages[{number}]={text!r} has no unit that is in no stage before it.",
                help="name another module in it, or leave the stage out; print(plan) shows the units.",
            )
    return made


def _members(units: Mapping[int, _Unit], place: str, text: str) -> set[int]:
    members: set[int] = set()
    for word in (word for part in text.split(",") if part.strip() for word in _expanded(part.strip(), place)):
        own = {number for number, unit in units.items() if under((word,), unit.paths)}
        if not own:
            known = (path for unit in units.values() for path in unit.paths)
            raise DirectiveError(f"{place}: no unit has {word!r}.", help=nearest(word, known))
        members |= own
    if not members:
        some = ", ".join(unit.name for unit in list(units.values())[:3])
        raise DirectiveError(f"{place} names no unit.", help=f"name modules, such as {some}; or leave the stage out.")
    return members


def _require_order(units: Mapping[int, _Unit], stage_of: Mapping[int, int]) -> None:
    for one, other in pairwise(units):
        if stage_of[one] > stage_of[other]:
            raise DirectiveError(
                f"stages[{stage_of[other]}] has {units[other].name}, but stages[{stage_of[one]}] has "
                f"{units[one].name}, which comes before it in the model.",
                help="list stages in the order of the model, each of neighbouring units; print(plan) shows them.",
            )


def _units(dag: Dag) -> dict[int, _Unit]:
    readers: dict[str, set[int | None]] = {}
    for op in dag.ops.values():
        for bucket in op.reads:
            readers.setdefault(bucket, set()).add(op.PP)
    names: dict[int, list[str]] = {}
    leaves: dict[int, list[str]] = {}
    for op in dag.ops.values():
        if op.PP is not None:
            names.setdefault(op.PP, []).append(op.name)
            own = (dag.buckets[b] for b in op.reads if len(readers[b]) == 1 and b in dag.buckets)
            leaves.setdefault(op.PP, []).extend(leaf.path for bucket in own for leaf in bucket.leaves)
    return {unit: _unit(names[unit], [_plain(path) for path in leaves[unit]]) for unit in sorted(names)}


def _unit(names: Sequence[str], leaves: Sequence[str]) -> _Unit:
    """What one of several readers of a parameter has in its name after ``#`` is found by that whole name alone."""
    plain = [re.sub(r"#\d+", "", name) for name in names if leaves or "#" not in name]
    modules = [word for name in plain for part in name.split("+") for word in (part, *_expanded(part))]
    return _Unit(names[0], tuple(dict.fromkeys([*names, *modules, *leaves])), bool(leaves))


def _plain(path: str) -> str:
    return path.removeprefix("params.")


def _expanded(word: str, place: str = "") -> list[str]:
    """``layers.0-2`` as ``layers.0``, ``layers.1``, ``layers.2``."""
    match = re.fullmatch(r"(.*\D|)(\d+)-(\d+)", _plain(word))
    if match is None:
        return [_plain(word)]
    stem, first, last = match[1], int(match[2]), int(match[3])
    if place and first > last:
        raise DirectiveError(f"{place}: {stem}{first}-{last} runs backwards.", help=f"write {stem}{last}-{first}.")
    return [f"{stem}{number}" for number in range(first, last + 1)]
