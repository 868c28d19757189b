"""Plans as JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import EllipsisType
from typing import Any, cast

from piper_jax.arguments import checked, shown
from piper_jax.errors import PiperError, PlanError
from piper_jax.ir.decoding import dag_from_data, decoded, from_record
from piper_jax.ir.encoding import dag_data, record
from piper_jax.ir.filters import And, Filter, Not, Or, Where, require_filter, where
from piper_jax.ir.nodes import DeviceGroup
from piper_jax.ir.rules import check_as_it_is
from piper_jax.planning.history import Applied
from piper_jax.planning.plan import Plan, Unbound

FORMAT, VERSION = "piper-plan", 1


def plan_json(plan: Plan) -> str:
    """The plan without its program; equal plans give equal text."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": plan.fingerprint,
        "structure": plan.source.structure,
        "dag": dag_data(plan.dag),
        "history": [_record_data(record) for record in plan.history],
    }
    return json.dumps(data, separators=(",", ":"))


@checked(PlanError)
def plan_from_json(text: str, name: str = "plan") -> Plan:
    """The plan that :func:`plan_json` wrote; ``name`` stands for it in messages.

    Raises:
      PlanError: the text is not a plan, or one of another version.
    """
    try:
        return _plan(text, name)
    except RecursionError:
        raise PlanError(
            f"{name} is nested too deeply to be one that plan.save wrote.", help="load a file that plan.save wrote."
        ) from None


def _plan(text: str, name: str) -> Plan:
    try:
        data: Any = json.loads(text)
    except ValueError as error:
        raise PlanError(f"{name} is not JSON: {error}.", help="load a file that plan.save wrote.") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f"{name} is not a piper plan.", help="load a file that plan.save wrote.")
    if data.get("version") != VERSION:
        raise PlanError(
            f"{name} has format version {data.get('version')}, this is version {VERSION}.",
            help="save the plan again with this version of piper-jax.",
        )
    try:
        return _contents(data)
    except PiperError as error:
        raise PlanError(f"{name} is damaged: {error.what}", help=error.help or "save the plan again.") from None


def _contents(data: dict[str, Any]) -> Plan:
    rows = decoded(list[Any], data.get("history"), "history")
    history = tuple(_record(row, f"history[{i}]") for i, row in enumerate(rows))
    source = Unbound(
        fingerprint=decoded(str, data.get("fingerprint"), "fingerprint"),
        structure=decoded(dict[str, tuple[str, ...]], data.get("structure", {}), "structure"),
    )
    dag = dag_from_data(data.get("dag"))
    check_as_it_is(dag)
    return Plan(dag=dag, history=history, source=source)


@checked(PlanError)
def load_plan(path: str | PathLike[str]) -> Plan:
    """Reads a plan that ``plan.save`` wrote: to print, check, simulate and draw it, or to ``bind`` and run it.

    Raises:
      PlanError: there is no such file, or it is not a plan.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot read {path}: {error}.", help="give a file that plan.save wrote.") from None
    return plan_from_json(text, str(path))


def _record_data(applied: Applied) -> list[Any]:
    return [applied.name, {name: _argument_data(value) for name, value in applied.arguments}, applied.line]


def _record(row: Any, at: str) -> Applied:
    name, arguments, line = decoded(tuple[str, dict[str, Any], str], row, at)
    given = tuple((key, _argument(value, f"{at}[1].{key}")) for key, value in arguments.items())
    return Applied(name=name, arguments=given, line=line)


def _argument_data(value: Any) -> Any:
    match value:
        case Where():
            return {"where": filter_data(value)}
        case Not(inner=inner):
            return {"not": _argument_data(inner)}
        case And(left=left, right=right):
            return {"and": [_argument_data(left), _argument_data(right)]}
        case Or(left=left, right=right):
            return {"or": [_argument_data(left), _argument_data(right)]}
        case DeviceGroup():
            return {"group": record(value)}
        case tuple():
            return {"tuple": [_argument_data(item) for item in value]}
        case list():
            return [_argument_data(item) for item in value]
        case _:
            return value


def _argument(data: Any, at: str) -> Any:
    match data:
        case {"where": dict(leaf)}:
            return _where(cast(dict[str, Any], leaf), at)
        case {"not": inner}:
            return ~require_filter(_argument(inner, at))
        case {"and": [left, right]}:
            return require_filter(_argument(left, at)) & _argument(right, at)
        case {"or": [left, right]}:
            return require_filter(_argument(left, at)) | _argument(right, at)
        case {"group": group}:
            return from_record(DeviceGroup, group, at)
        case {"tuple": list(items)}:
            return tuple(_argument(item, at) for item in items)
        case list():
            return [_argument(item, at) for item in data]
        case dict():
            raise PlanError(f"{at}: {shown(data)} is no argument.")
        case _:
            return data


def filter_data(leaf: Where) -> dict[str, Any]:
    """A ``where`` as plain data, without the fields that are None."""
    written: dict[str, Any] = {}
    for name, spec in leaf.coordinates():
        if isinstance(spec, range):
            written[name] = {"range": [spec.start, spec.stop, spec.step]}
        elif isinstance(spec, EllipsisType):
            written[name] = "..."
        else:
            written[name] = list(spec) if isinstance(spec, tuple) else spec
    for name, words in (("PASS", leaf.PASS), ("path", leaf.path)):
        if words is not None:
            written[name] = list(words)
    return written


def _where(data: Mapping[str, Any], at: str) -> Filter:
    arguments: dict[str, Any] = {}
    for name, spec in data.items():
        match spec:
            case {"range": bounds}:
                start, stop, step = decoded(tuple[int, int, int], bounds, at)
                arguments[name] = range(start, stop, step or 1)
            case "...":
                arguments[name] = ...
            case _:
                arguments[name] = tuple(spec) if isinstance(spec, list) else spec
    return where(**arguments)
