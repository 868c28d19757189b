"""From a preset and changes to checked sizes. Imports no JAX, so a configuration is checked before anything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from piper_jax.errors import ConfigError, suggest

Dtype = Literal["float32", "bfloat16", "float64"]
Sizes = TypeVar("Sizes")


def from_preset(model: str, presets: Mapping[str, Sizes], preset: str, changes: Mapping[str, Any]) -> Sizes:
    """A preset with some fields changed; whether the sizes fit each other is for the caller to check.

    Args:
      model: its name, for messages.
      changes: field of the preset's dataclass -> value.

    Raises:
      ConfigError: an unknown preset or field, or a value of the wrong type.
    """
    if preset not in presets:
        raise ConfigError(f"{model}: there is no preset {preset!r}.", help=suggest(str(preset), presets))
    chosen: Any = presets[preset]
    names = {field.name for field in fields(chosen)}
    hints = get_type_hints(type(chosen))
    for name, value in changes.items():
        if name not in names:
            fix = suggest(name, {*names, "preset"})
            raise ConfigError(f"{model}: there is no argument {name!r}.", help=fix, argument=name)
        if not _fits(value, hints[name]):
            fix = f"give {_described(hints[name])}."
            raise ConfigError(f"{model}: {name}={value!r} has the wrong type.", help=fix, argument=name)
    return replace(chosen, **changes)


def _fits(value: object, hint: Any) -> bool:
    if get_args(hint):
        return value in get_args(hint)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is hint


def _described(hint: Any) -> str:
    options = get_args(hint)
    return f"one of {', '.join(options)}" if options else f"a value of type {hint.__name__}"
