"""The text of ``--select`` as a filter."""

from __future__ import annotations

import re
from typing import Any

from piper_jax.errors import ConfigError, FilterError, suggest
from piper_jax.ir.filters import Filter, Spec, where

NUMBERS, WORDS = ("PP", "EP", "MB"), ("PASS", "path")


def parsed_filter(text: str) -> Filter:
    """``PP=0-1,PASS=F`` as ``where(PP=(0, 1), PASS="F")``.

    Coordinates are ``PP=0``, ``PP=0-3`` (with both ends), ``PP=(0,2)``, or ``PP=...`` for any; words are ``PASS=F``,
    ``PASS=(F,B)``, ``path=layers.3`` or a pattern such as ``path=layers.*``.

    Raises:
      ConfigError: not of this form, or a pass that does not exist.
    """
    if not text.strip():
        raise _fault(text, "selects nothing", "such as PP=0,PASS=F; leave --select out for everything.")
    found: dict[str, Any] = {}
    for part in re.split(r",(?![^()]*\))", text):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise _fault(text, f"{part.strip()!r} is not of the form key=value", "such as PP=0,PASS=F.")
        if name not in (*NUMBERS, *WORDS):
            raise _fault(text, f"unknown coordinate {name!r}", suggest(name, (*NUMBERS, *WORDS)))
        if name in found:
            raise _fault(text, f"{name} is given twice", f"write several as {_several(name)}.")
        found[name] = _numbers(text, name, value) if name in NUMBERS else _words(text, name, value)
    try:
        return where(**found)
    except FilterError as error:
        raise _fault(text, error.what.removesuffix("."), error.help) from None


def _numbers(text: str, name: str, value: str) -> Spec:
    if value == "...":
        return ...
    numbers: list[int] = []
    for item in _items(value):
        bounds = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", item)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if last < first:
            fix = f"write a number, 0-3, (0,2), or ... for any: {name}=0-3."
            raise _fault(text, f"{name}={value} is no coordinate", fix)
        if "-" in item and len(_items(value)) == 1:
            return range(first, last + 1)
        numbers += range(first, last + 1)
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def _words(text: str, name: str, value: str) -> tuple[str, ...]:
    words = tuple(item.strip("\"'") for item in _items(value))
    if not all(words):
        raise _fault(text, f"{name}={value} is empty", f"write {_several(name)}.")
    return words


def _items(value: str) -> list[str]:
    inside = value[1:-1] if value.startswith("(") and value.endswith(")") else value
    return [item.strip() for item in inside.removesuffix(",").split(",")]


def _several(name: str) -> str:
    return {"PASS": "PASS=(F,B)", "path": "path=(layers.0,layers.1)"}.get(name, f"{name}=(0,1)")


def _fault(text: str, what: str, fix: str) -> ConfigError:
    return ConfigError(f"--select {text!r}: {what}.", help=fix)
