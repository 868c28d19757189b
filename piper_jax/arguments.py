"""Arguments of public functions and fields of public values, held against their own type hints."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

from piper_jax.errors import PiperError, suggest
from piper_jax.hints import Misfit, hint_text, hints_of, misfit

P = ParamSpec("P")
T = TypeVar("T")
MAX_SHOWN = 60
GIVEN = ("self", "cls", "dag")
"""Arguments that a user does not write."""
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def checked(error: type[PiperError], *, apart: Collection[str] = ()) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: a call that the function's signature and type hints do not allow raises ``error``. ::

    simulate(plan, costs=3)  -->  simulate: costs=3 is not str, CostModel, Mapping[...] or None.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            require_call(function, args, kwargs, error, place=f"{function.__name__}: ", apart=apart)
            return function(*args, **kwargs)

        return call

    return decorate


def require_call(
    function: Callable[..., Any],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    error: type[PiperError],
    *,
    place: str = "",
    apart: Collection[str] = (),
) -> None:
    """Raises ``error`` for an argument that is missing, unknown or of the wrong type; the docstring says the right one.

    Args:
      apart: arguments whose types the function checks itself.
    """
    signature = _signature(function)
    unknown = [name for name in kwargs if name not in signature.parameters]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        known = [name for name in signature.parameters if name not in GIVEN]
        raise error(f"{place}there is no argument {unknown[0]!r}.", help=suggest(unknown[0], known))
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as fault:
        names = ", ".join(str(p).partition(":")[0] for n, p in signature.parameters.items() if n not in GIVEN)
        raise error(f"{place}{fault}.", help=f"{function.__name__}({names}).") from None
    hints = hints_of(function)
    for name, value in given.items():
        declared = name in hints and name not in apart and signature.parameters[name].kind not in VARIADIC
        found = misfit(hints[name], value) if declared else None
        if found is not None:
            help = documented(function, name) or f"give {hint_text(found.hint)}."
            raise error(f"{place}{name}{misfit_text(found)}.", help=help)


def require_fields(item: Any, error: type[PiperError], place: str = "") -> None:
    """Raises ``error`` for a field of a dataclass that is not what it declares."""
    for name, found in misfits(item):
        fix = documented(type(item), name) or f"give {hint_text(found.hint)}."
        raise error(f"{place}{name}{misfit_text(found)}.", help=fix)


def misfits(item: Any) -> list[tuple[str, Misfit]]:
    """The fields of a dataclass that are not what they declare."""
    hints = hints_of(type(item))
    found = ((f.name, misfit(hints[f.name], getattr(item, f.name))) for f in dataclasses.fields(item))
    return [(name, wrong) for name, wrong in found if wrong is not None]


def misfit_text(found: Misfit) -> str:
    """``[1]=2.5 is not int``."""
    return f"{found.at}={shown(found.value)} is not {hint_text(found.hint)}"


def shown(value: object) -> str:
    """A value in one short line, or its type."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_SHOWN else f"<{type(value).__name__}>"


def documented(declared: Callable[..., Any] | type, name: str) -> str:
    """The first sentence of what the docstring says of an argument or attribute; "" where it says nothing."""
    entry = rf"^  (?:\w+, )*{name}(?:, \w+)*: (.*(?:\n    .*)*)"
    found = re.search(entry, inspect.getdoc(declared) or "", re.MULTILINE)
    first = re.split(r"\.(?=\s|$)", found[1])[0] if found else ""
    return f"{' '.join(first.split()).replace('``', '')}." if first else ""


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)
