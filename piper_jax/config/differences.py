"""Two configurations, key by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from piper_jax.config.schema import Config

ABSENT = "(absent)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A key with two values.

    Attributes:
      key: such as ``optimizer.learning_rate``; a list counts as one value.
      before, after: the values; ``ABSENT`` where free keys, such as arguments of a model, are in one of the two only.
    """

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.after!r}"


def differing_keys(before: Config, after: Config) -> tuple[Difference, ...]:
    """Every key whose values differ, in the order of the schema."""
    return tuple(_differences((), before.model_dump(), after.model_dump()))


def _differences(path: tuple[str, ...], before: Any, after: Any) -> Iterator[Difference]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in dict.fromkeys([*before, *after]):
            yield from _differences((*path, str(name)), before.get(name, ABSENT), after.get(name, ABSENT))
    elif before != after:
        yield Difference(key=".".join(path), before=before, after=after)
