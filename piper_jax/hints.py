"""Values held against type hints: what a function or a dataclass declares is the rule for what it takes."""

from __future__ import annotations

import functools
import numbers
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin


@dataclass(frozen=True, slots=True)
class From:
    """Legal numbers, in ``Annotated[int, From(1)]`` or ``Annotated[int, From(0, 3)]``."""

    least: int
    most: int | None = None

    def __str__(self) -> str:
        return f"a number from {self.least}" + ("" if self.most is None else f" to {self.most}")

    def admits(self, value: Any) -> bool:
        return value >= self.least and (self.most is None or value <= self.most)


@dataclass(frozen=True, slots=True)
class NotEmpty:
    """Text that is there, in ``Annotated[str, NotEmpty()]``."""

    def __str__(self) -> str:
        return "a name"

    def admits(self, value: Any) -> bool:
        return bool(value.strip())


Name = Annotated[str, NotEmpty()]


class Misfit(NamedTuple):
    """The innermost part of a value that is not what its hint says; ``at`` is where, such as ``[0][2]``."""

    at: str
    value: object
    hint: Any


@functools.cache
def hints_of(declared: Any) -> Mapping[str, Any]:
    """The hints of a function's arguments, or of a dataclass's fields, with their ranges."""
    return typing.get_type_hints(declared, include_extras=True)


@functools.cache
def fits(hint: Any) -> Callable[[Any], bool]:
    """Whether a value is what ``hint`` says. Subclasses and longer kinds of numbers fit; True is no int."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner, ranges = fits(parts[0]), parts[1:]
        return lambda value: inner(value) and all(known.admits(value) for known in ranges)
    if origin in (Union, types.UnionType):
        kinds = [fits(part) for part in parts]
        return lambda value: any(kind(value) for kind in kinds)
    if origin is Literal:
        legal = {(type(part), part) for part in parts}
        return lambda value: isinstance(value, Hashable) and (type(value), value) in legal
    if origin is tuple and parts[-1] is not ...:
        items = [fits(part) for part in parts]
        return lambda value: isinstance(value, tuple) and len(value) == len(items) and _all_fit(items, value)
    if origin is Mapping or origin is dict:
        key, item = fits(parts[0]), fits(parts[1])
        return lambda value: isinstance(value, origin) and all(key(k) and item(v) for k, v in value.items())
    if origin in (tuple, list, Sequence):
        item = fits(parts[0])
        return lambda value: isinstance(value, origin) and not isinstance(value, str | bytes) and all(map(item, value))
    return _simple(hint, origin)


def misfit(hint: Any, value: Any, at: str = "") -> Misfit | None:
    """The innermost part of ``value`` that is not what ``hint`` says, or None."""
    if fits(hint)(value):
        return None
    origin, parts = get_origin(hint), get_args(hint)
    found: list[Misfit | None] = []
    if origin in (Union, types.UnionType, Annotated):
        found = [misfit(part, value, at) for part in (parts[:1] if origin is Annotated else parts)]
    elif origin in (Mapping, dict) and isinstance(value, origin):
        found = [misfit(parts[1], item, f"{at}[{key!r}]") for key, item in value.items()]
    elif origin in (tuple, list, Sequence) and isinstance(value, origin) and not isinstance(value, str | bytes):
        hints = parts if origin is tuple and parts[-1] is not ... else parts[:1] * len(value)
        if len(hints) == len(value):
            found = [misfit(h, item, f"{at}[{i}]") for i, (h, item) in enumerate(zip(hints, value, strict=True))]
    inner = max((m for m in found if m is not None), key=lambda m: len(m.at), default=None)
    return inner if inner is not None and len(inner.at) > len(at) else Misfit(at, value, hint)


def hint_text(hint: Any) -> str:
    """``int or Sequence[int]``: a hint in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " and ".join(str(known) for known in parts[1:])
    if origin in (Union, types.UnionType):
        return _listed([hint_text(p) for part in parts for p in _choices(part)])
    if origin is Literal:
        return _listed([repr(part) for part in parts])
    if hint in (..., types.EllipsisType, types.NoneType):
        return "None" if hint is types.NoneType else "..."
    if origin is Callable:
        return "a function"
    name = getattr(origin or hint, "__name__", str(hint))
    return f"{name}[{', '.join(hint_text(part) for part in parts)}]" if parts else name


def _choices(hint: Any) -> Sequence[Any]:
    return [Literal[part] for part in get_args(hint)] if get_origin(hint) is Literal else [hint]


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _all_fit(kinds: Iterable[Callable[[Any], bool]], values: Iterable[Any]) -> bool:
    return all(kind(value) for kind, value in zip(kinds, values, strict=True))


def _simple(hint: Any, origin: Any) -> Callable[[Any], bool]:
    """For a hint that says nothing of what is inside."""
    if hint in (Any, object) or isinstance(hint, TypeVar):
        return lambda value: True
    if origin in (Callable, type):
        return callable if origin is Callable else lambda value: isinstance(value, type)
    if origin is Iterable:
        return lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes)
    if hint in (int, float):
        number = int if hint is int else numbers.Real
        return lambda value: isinstance(value, number) and not isinstance(value, bool)
    kind = origin or hint
    return lambda value: isinstance(value, kind)
