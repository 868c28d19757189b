"""Plain data from JSON as a DAG again, held against what the dataclasses of the IR declare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

from piper_jax.arguments import misfit_text, shown
from piper_jax.errors import PlanError, suggest
from piper_jax.hints import From, Name, hints_of, misfit
from piper_jax.ir.dag import Coupling, Dag, Slot
from piper_jax.ir.ids import NodeId, Pass
from piper_jax.ir.nodes import (
    Bucket,
    Collective,
    Compute,
    Count,
    DataEdge,
    DeviceGroup,
    Node,
    Op,
    OrderEdge,
    Recv,
    Send,
    Update,
    Value,
)

T = TypeVar("T")
Row = list[Any]
Find = Callable[[Row, str], tuple[NodeId, ...]]
NODES: Mapping[str, type[Any]] = {cls.__name__: cls for cls in (Compute, Update, Send, Recv, Collective)}
TABLES: Mapping[str, type[Any]] = {"groups": DeviceGroup, "ops": Op, "values": Value, "buckets": Bucket}
ROWS = ("nodes", "data", "order", "slots")
COORDINATES = tuple[str, Pass | None, Count | None, Count | None, Count | None]
PLACE = tuple[str | None, Name]
VALUES = tuple[str, ...]


def dag_from_data(data: object) -> Dag:
    """The DAG that :func:`piper_jax.ir.encoding.dag_data` wrote.

    Raises:
      PlanError: ``data`` is anything else; names the place, such as ``ops[3].flops_forward``.
    """
    given = decoded(dict[str, Any], data, "dag")
    rows: dict[str, list[Row]] = {name: decoded(list[Row], given.get(name), name) for name in ROWS}
    ids = [NodeId(*decoded(COORDINATES, tuple(row[1:6]), f"nodes[{i}][1:6]")) for i, row in enumerate(rows["nodes"])]
    find = _finder(ids)
    nodes = [_node(row, name, find, f"nodes[{i}]") for i, (name, row) in enumerate(zip(ids, rows["nodes"]))]
    tables: dict[str, Any] = {name: _table(cls, given.get(name), name) for name, cls in TABLES.items()}
    return Dag(
        nodes=_by_name(zip(ids, nodes), "nodes"),
        data=tuple(_data(row, find, f"data[{i}]") for i, row in enumerate(rows["data"])),
        order=tuple(_order(row, find, f"order[{i}]") for i, row in enumerate(rows["order"])),
        slots=tuple(_slot(row, find, f"slots[{i}]") for i, row in enumerate(rows["slots"])),
        couplings=tuple(_records(Coupling, given.get("couplings"), "couplings")),
        common_optimizer_bytes=decoded(Count, given.get("common_optimizer_bytes", 0), "common_optimizer_bytes"),
        num_microbatches=decoded(Annotated[int, From(1)], given.get("num_microbatches"), "num_microbatches"),
        **tables,
    )


def from_record(cls: type[T], row: object, at: str) -> T:
    """A dataclass from what :func:`piper_jax.ir.encoding.record` wrote.

    Raises:
      PlanError: a field is missing, unknown, or not what it declares.
    """
    given, hints = decoded(dict[str, Any], row, at), hints_of(cls)
    for name in given:
        if name not in hints:
            raise PlanError(f"{at}: there is no {name!r}.", help=suggest(name, hints))
    for f in fields(cast(Any, cls)):
        if f.name not in given and f.default is MISSING and f.default_factory is MISSING:
            raise PlanError(f"{at}: {f.name} is missing.")
    return cls(**{name: decoded(hints[name], value, f"{at}.{name}") for name, value in given.items()})


def decoded(hint: Any, data: object, at: str) -> Any:
    """``data`` with tuples and dataclasses where ``hint`` has them.

    Raises:
      PlanError: it does not fit.
    """
    value = _converted(hint, data, at)
    found = misfit(hint, value)
    if found is not None:
        raise PlanError(f"{at}{misfit_text(found)}.")
    return value


def _converted(hint: Any, data: Any, at: str) -> Any:
    if isinstance(data, dict) and get_origin(hint) is dict:
        given = cast(dict[str, Any], data)
        return {name: _converted(get_args(hint)[1], value, f"{at}.{name}") for name, value in given.items()}
    if isinstance(data, dict):
        record = next((part for part in (hint, *get_args(hint)) if isinstance(part, type) and is_dataclass(part)), None)
        return cast(Any, data) if record is None else from_record(cast(type[Any], record), cast(object, data), at)
    if not isinstance(data, list):
        return data
    items, origin, parts = cast(list[Any], data), get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return next((new for part in parts if (new := _converted(part, items, at)) is not items), items)
    if origin is not tuple:
        return items
    hints = parts[:1] * len(items) if parts[-1] is ... else (*parts, *[Any] * len(items))
    return tuple(_converted(h, item, f"{at}[{i}]") for i, (h, item) in enumerate(zip(hints, items)))


def _records(cls: type[T], rows: object, at: str) -> list[T]:
    return [from_record(cls, row, f"{at}[{i}]") for i, row in enumerate(decoded(list[Any], rows, at))]


def _table(cls: type[Any], rows: object, at: str) -> dict[str, Any]:
    return _by_name(((item.name, item) for item in _records(cls, rows, at)), at)


def _by_name(items: Iterable[tuple[Any, T]], at: str) -> dict[Any, T]:
    table: dict[Any, T] = {}
    for i, (name, item) in enumerate(items):
        if name in table:
            raise PlanError(f"{at}[{i}]: {name} is there twice.")
        table[name] = item
    return table


def _finder(ids: list[NodeId]) -> Find:
    """A function from a row of numbers to the nodes that it lists."""
    number = Annotated[int, From(0, len(ids) - 1)]

    def find(numbers: Row, at: str) -> tuple[NodeId, ...]:
        if not all(type(n) is int and 0 <= n < len(ids) for n in numbers):
            decoded(tuple[number, ...], numbers, at)
        return tuple(ids[cast(int, n)] for n in numbers)

    return find


def _node(row: Row, name: NodeId, find: Find, at: str) -> Node:
    group, stream = decoded(PLACE, tuple(row[6:8]), f"{at}[6:8]")
    if not isinstance(row[0], str) or row[0] not in NODES:
        raise PlanError(f"{at}[0]={shown(row[0])} is no kind of node.", help=suggest(str(row[0]), NODES))
    if row[0] == "Compute":
        return Compute(id=name, group=group, stream=stream)
    extra: dict[str, Any] = dict(decoded(dict[str, Any], row[8] if len(row) > 8 else {}, f"{at}[8]"))
    if "match" in extra:
        (extra["match"],) = find([extra["match"]], f"{at}[8].match")
    return from_record(NODES[row[0]], {**extra, "id": name, "group": group, "stream": stream}, at)


def _ends(row: Row, find: Find, at: str) -> tuple[NodeId, NodeId]:
    src, dst = find(row[:2] if len(row) > 2 else decoded(tuple[int, int, str], row, at), at)
    return src, dst


def _data(row: Row, find: Find, at: str) -> DataEdge:
    return DataEdge(*_ends(row, find, at), decoded(VALUES, tuple(row[2:]), f"{at}[2:]"))


def _order(row: Row, find: Find, at: str) -> OrderEdge:
    return OrderEdge(*_ends(row, find, at), *decoded(tuple[str], row[2:], f"{at}[2:]"))


def _slot(row: Row, find: Find, at: str) -> Slot:
    (group,) = decoded(tuple[str], tuple(row[:1]), at)
    if len(row) < 2:
        raise PlanError(f"{at}: a slot of {group} lists no node.")
    return Slot(group=group, nodes=find(row[1:], f"{at}[1:]"))
