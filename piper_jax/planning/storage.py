"""Plans as JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any

from piper_jax.errors import FilterError, PlanError
from piper_jax.ir.encoding import dag_data, dag_from_data, from_record, record
from piper_jax.ir.filters import And, Filter, Not, Or, Where, where
from piper_jax.ir.nodes import DeviceGroup
from piper_jax.planning.history import Applied
from piper_jax.planning.plan import Plan, Unbound

FORMAT, VERSION = "piper-plan", 1


def plan_json(plan: Plan) -> str:
    """The plan without its program; equal plans give equal text."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": plan.fingerprint,
        "dag": dag_data(plan.dag),
        "history": [_record_data(record) for record in plan.history],
    }
    return json.dumps(data, separators=(",", ":"))


def plan_from_json(text: str, name: str = "plan") -> Plan:
    """The plan that :func:`plan_json` wrote; ``name`` stands for it in messages.

    Raises:
      PlanError: the text is not a plan, or one of another version.
    """
    try:
        data: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"{name} is not JSON: {error}.", help="load a file that plan.save wrote.") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f"{name} is not a piper plan.", help="load a file that plan.save wrote.")
    if data.get("version") != VERSION:
        raise PlanError(
            f"{name} has format version {data.get('version')}, this is version {VERSION}.",
            help="save the plan again with this version of piper-jax.",
        )
    try:
        history = tuple(_record(row) for row in data["history"])
        return Plan(
            dag=dag_from_data(data["dag"]), history=history, source=Unbound(fingerprint=str(data["fingerprint"]))
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, FilterError) as error:
        raise PlanError(f"{name} is damaged: {type(error).__name__}: {error}.", help="save the plan again.") from None


def load_plan(path: str | Path) -> Plan:
    """Reads a plan that ``plan.save`` wrote: to print, check, simulate and draw it, or to ``bind`` and run it.

    Raises:
      PlanError: there is no such file, or it is not a plan.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read {path}: {error}.", help="give a file that plan.save wrote.") from None
    return plan_from_json(text, str(path))


def _record_data(applied: Applied) -> list[Any]:
    return [applied.name, {name: _argument_data(value) for name, value in applied.arguments}, applied.line]


def _record(row: list[Any]) -> Applied:
    name, arguments, line = row
    return Applied(name=name, arguments=tuple((key, _argument(value)) for key, value in arguments.items()), line=line)


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


def _argument(data: Any) -> Any:
    if isinstance(data, list):
        return [_argument(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, inner),) = data.items()
    match kind:
        case "where":
            return _where(inner)
        case "not":
            return Not(inner=_argument(inner))
        case "and":
            return And(left=_argument(inner[0]), right=_argument(inner[1]))
        case "or":
            return Or(left=_argument(inner[0]), right=_argument(inner[1]))
        case "group":
            return from_record(DeviceGroup, inner)
        case "tuple":
            return tuple(_argument(item) for item in inner)
        case _:
            raise ValueError(f"unknown argument {kind!r}")


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


def _where(data: Mapping[str, Any]) -> Filter:
    arguments: dict[str, Any] = {}
    for name, spec in data.items():
        if isinstance(spec, dict):
            arguments[name] = range(*spec["range"])
        elif spec == "...":
            arguments[name] = ...
        else:
            arguments[name] = tuple(spec) if isinstance(spec, list) else spec
    return where(**arguments)
