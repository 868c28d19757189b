"""``key=value`` on the command line: later than the file, by the same rules."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, cast

import yaml

from piper_jax.config.text import Document, Path, parse_value
from piper_jax.errors import ConfigError


def overridden(document: Document, overrides: Iterable[str]) -> Document:
    """The document with each ``a.b=value`` set.

    Values are YAML: ``train.steps=20``, ``optimizer.learning_rate=1e-4``, ``strategy.directives=[GPipe]``,
    ``optimizer.clip_norm=null``. A list item is named by its number: ``data.paths.0=a.txt``.

    Raises:
      ConfigError: not of this form, or the value is not YAML.
    """
    values, places = copy.deepcopy(document.values), dict(document.places)
    for text in overrides:
        path, value = _parsed(text)
        _set(values, path, value, text)
        places = {known: at for known, at in places.items() if known[: len(path)] != path}
        places[path] = f"override {text!r}"
    return Document(values=values, places=places)


def _parsed(text: str) -> tuple[Path, Any]:
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"override {text!r}: not of the form key=value.", help="such as train.steps=20.")
    try:
        return tuple(int(name) if name.isdigit() else name for name in names), parse_value(value)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise ConfigError(
            f"override {text!r}: the value is not YAML: {problem}.", help="quote it: key='\"value\"'."
        ) from None


def _set(values: dict[str, Any], path: Path, value: Any, text: str) -> None:
    inner: Any = values
    for depth, name in enumerate(path[:-1]):
        inner = _child(inner, name, path[:depth], text, make=True)
    if not isinstance(inner, (dict, list)):
        raise _no_keys(path[:-1], text)
    if isinstance(inner, list):
        _child(inner, path[-1], path[:-1], text, make=False)
    cast(Any, inner)[path[-1]] = value


def _child(inner: Any, name: str | int, above: Path, text: str, *, make: bool) -> Any:
    if isinstance(inner, list):
        if not isinstance(name, int) or name >= len(inner):
            where = ".".join(map(str, above))
            raise ConfigError(
                f"override {text!r}: {where} has no item {name}.", help=f"it has {len(inner)}; the first is {where}.0."
            )
        return inner[name]
    if not isinstance(inner, dict):
        raise _no_keys(above, text)
    if make and inner.get(name) is None:
        inner[name] = {}
    return inner.get(name)


def _no_keys(above: Path, text: str) -> ConfigError:
    where = ".".join(map(str, above))
    return ConfigError(f"override {text!r}: {where} is a value, it has no keys.", help=f"set {where}=... as a whole.")
