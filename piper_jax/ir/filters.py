"""Filters: which nodes of a plan a directive acts on, as data that prints as the text a user writes.

``where(PP=0, PASS="F")`` selects by coordinates and path; filters combine with ``~``, ``&`` and ``|``. A filter selects
compute nodes; updates are selected only where ``PASS="U"`` is named.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import EllipsisType
from typing import ClassVar, assert_never, cast

from piper_jax.arguments import shown
from piper_jax.errors import FilterError, suggest
from piper_jax.ir.ids import PASSES, NodeId

Spec = int | range | tuple[int, ...] | EllipsisType
"""What a coordinate may be: one number, a range, several numbers, or ``...`` for any number (but not none)."""

MAX_DEPTH = 300
ADMITTED = {"F": ("F",), "B": ("B", "BI", "BW"), "BI": ("BI",), "BW": ("BW",), "U": ("U",)}
"""The passes of nodes that each named pass selects."""

MEANINGS = {
    "F": "forward",
    "B": "backward, whole or both halves of it",
    "BI": "backward for inputs, once an order names it",
    "BW": "backward for weights, once an order names it",
    "U": "update, of parameters and optimizer state, once per step",
}


class Combinable:
    """The operators that every filter has. Only the four classes of ``Filter`` derive from it."""

    __slots__ = ()

    def __invert__(self) -> Not:
        return Not(inner=cast(Filter, self))

    def __and__(self, other: Filter) -> And:
        return And(left=cast(Filter, self), right=require_filter(other))

    def __or__(self, other: Filter) -> Or:
        return Or(left=cast(Filter, self), right=require_filter(other))


@dataclass(frozen=True, slots=True, kw_only=True)
class Where(Combinable):
    """Nodes whose coordinates and path agree with every field that is not None. Made by :func:`where`."""

    PP: Spec | None = None
    EP: Spec | None = None
    MB: Spec | None = None
    PASS: tuple[str, ...] | None = None
    path: tuple[str, ...] | None = None
    depth: ClassVar[int] = 0

    def __str__(self) -> str:
        parts = [f"{name}={_spec_text(spec)}" for name, spec in self.coordinates()]
        for name, words in (("PASS", self.PASS), ("path", self.path)):
            if words is not None:
                inner = ", ".join(f'"{word}"' for word in words)
                parts.append(f"{name}={inner}" if len(words) == 1 else f"{name}=({inner})")
        return f"where({', '.join(parts)})"

    def coordinates(self) -> Iterator[tuple[str, Spec]]:
        """The numeric coordinates that are named, with what they may be."""
        for name, spec in (("PP", self.PP), ("EP", self.EP), ("MB", self.MB)):
            if spec is not None:
                yield name, spec

    def admits_id(self, node: NodeId) -> bool:
        """Whether pass and coordinates agree, leaving the path aside."""
        if self.PASS is None:
            if node.PASS == "U":
                return False
        elif not any(node.PASS in ADMITTED[name] for name in self.PASS):
            return False
        return (
            (self.PP is None or admits(self.PP, node.PP))
            and (self.EP is None or admits(self.EP, node.EP))
            and (self.MB is None or admits(self.MB, node.MB))
        )


class Compound(Combinable):
    """A filter made of others, ``depth`` operators inside one another."""

    __slots__ = ()

    def __post_init__(self) -> None:
        depth = 1 + max(getattr(self, name).depth for name in ("inner", "left", "right") if hasattr(self, name))
        object.__setattr__(self, "depth", depth)
        if depth > MAX_DEPTH:
            raise FilterError(
                f"a filter of more than {MAX_DEPTH} operators, one inside another.",
                help="name several coordinates at once: where(MB=(0, 1, 2)) or where(MB=range(3)).",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Not(Compound):
    """Compute nodes that ``inner`` does not select."""

    inner: Filter
    depth: int = field(default=0, init=False, repr=False, compare=False)

    def __str__(self) -> str:
        return f"~{self.inner}"


@dataclass(frozen=True, slots=True, kw_only=True)
class And(Compound):
    """Nodes that both select."""

    left: Filter
    right: Filter
    depth: int = field(default=0, init=False, repr=False, compare=False)

    def __str__(self) -> str:
        return f"({self.left} & {self.right})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Or(Compound):
    """Nodes that either selects."""

    left: Filter
    right: Filter
    depth: int = field(default=0, init=False, repr=False, compare=False)

    def __str__(self) -> str:
        return f"({self.left} | {self.right})"


Filter = Where | Not | And | Or


def where(
    path: str | Iterable[str] | None = None,
    *,
    PASS: str | Iterable[str] | None = None,
    PP: Spec | None = None,
    EP: Spec | None = None,
    MB: Spec | None = None,
    **unknown: object,
) -> Where:
    """Selects nodes by coordinates and module path; ``where()`` selects all computation.

    Args:
      path: module path such as ``"layers.0"`` (which contains ``layers.0.mlp``), a pattern such as ``"*.experts"``, or
        several of them.
      PASS: ``"F"``, ``"B"``, ``"BI"``, ``"BW"``, ``"U"`` or several; ``"B"`` selects BI and BW too.
      PP, EP, MB: a number, a range, a tuple of numbers, or ``...`` for any.
      **unknown: any other name is an error.

    Returns:
      A filter, which is a value: it prints as this call.

    Raises:
      FilterError: an unknown name or pass, a negative or non-integer coordinate, or one together with ``PASS="U"``.
    """
    for name in unknown:
        raise FilterError(
            f"where({name}=...): unknown coordinate {name!r}.", help=suggest(name, ("PASS", "PP", "EP", "MB", "path"))
        )
    passes = _words("PASS", PASS)
    for name in passes or ():
        if name not in PASSES:
            words = {
                word: known for known, said in MEANINGS.items() for word in (known.lower(), said.partition(",")[0])
            }
            near = words.get(name.strip().lower())
            raise FilterError(
                f"where(PASS={name!r}): unknown pass.",
                detail=(f'"{known}": {said}' for known, said in MEANINGS.items()),
                help=f"did you mean {near!r}?" if near else suggest(name, PASSES),
            )
    for name, spec in (("PP", PP), ("EP", EP), ("MB", MB)):
        _require_spec(name, spec)
        if spec is not None and passes is not None and "U" in passes:
            raise FilterError(
                f"where(PASS='U', {name}=...): an update has no {name}, it runs once per step for each state.",
                help=f"leave {name} out; PASS is F, B, BI or BW with it, and path names the state of an update.",
            )
    return Where(PP=PP, EP=EP, MB=MB, PASS=passes, path=_words("path", path))


def require_filter(filter: object) -> Filter:
    """The filter that ``filter`` is. Raises FilterError for what is none."""
    if not isinstance(filter, Where | Not | And | Or):
        raise FilterError(
            f"{shown(filter)} is not a filter.", help="write where(PP=0, PASS='F') or a combination of such."
        )
    return filter


def leaves(filter: Filter) -> Iterator[Where]:
    """Every ``where`` inside a filter, left to right."""
    match filter:
        case Where():
            yield filter
        case Not(inner=inner):
            yield from leaves(inner)
        case And(left=left, right=right) | Or(left=left, right=right):
            yield from leaves(left)
            yield from leaves(right)
        case _ as never:
            assert_never(never)


def selects(filter: Filter, node: NodeId, paths: Callable[[NodeId], tuple[str, ...]]) -> bool:
    """Whether ``filter`` selects ``node``, whose module paths ``paths`` gives."""
    match filter:
        case Where():
            return filter.admits_id(node) and (filter.path is None or under(filter.path, paths(node)))
        case Not(inner=inner):
            return node.PASS != "U" and not selects(inner, node, paths)
        case And(left=left, right=right):
            return selects(left, node, paths) and selects(right, node, paths)
        case Or(left=left, right=right):
            return selects(left, node, paths) or selects(right, node, paths)
        case _ as never:
            assert_never(never)


def admits(spec: Spec, value: int | None) -> bool:
    """Whether a coordinate's value agrees with what a filter names for it."""
    if value is None:
        return False
    if isinstance(spec, EllipsisType):
        return True
    return value == spec if isinstance(spec, int) else value in spec


def under(patterns: tuple[str, ...], paths: tuple[str, ...]) -> bool:
    """Whether any path is, lies under, or matches one of the patterns."""
    return any(
        path == pattern or path.startswith(pattern + ".") or fnmatch.fnmatchcase(path, pattern)
        for pattern in patterns
        for path in paths
    )


def _words(name: str, words: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if words is None:
        return None
    alone = isinstance(words, str) or not isinstance(cast(object, words), Iterable)
    listed = cast(tuple[object, ...], (words,) if alone else tuple(words))
    for word in listed:
        if not isinstance(word, str):
            what = f"where({name}={shown(words)}): {shown(word)} is not a string."
            raise FilterError(what, help=f"{name} is a string or several.")
    return cast(tuple[str, ...], listed)


def _require_spec(name: str, spec: Spec | None) -> None:
    if spec is None or isinstance(spec, EllipsisType):
        return
    numbers: Iterable[object] = spec if isinstance(spec, tuple | range) else (spec,)
    for number in numbers:
        if type(number) is not int or number < 0:
            raise FilterError(
                f"where({name}={spec!r}): {number!r} is not a coordinate.",
                help=f"{name} is a number from 0, a range, a tuple of numbers, or ... for any.",
            )


def _spec_text(spec: Spec) -> str:
    return "..." if isinstance(spec, EllipsisType) else repr(spec)
