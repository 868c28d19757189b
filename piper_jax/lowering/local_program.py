"""A function of the arrays that one replica sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from piper_jax.lowering.keys import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProgram:
    """A function of local arrays with the keys of its inputs and outputs."""

    label: str
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    body: Callable[[dict[Key, Any]], dict[Key, Any]]

    def chained(self, group: str) -> LocalProgram:
        """The same with the group's token as input and output, so that it runs after the group's program before it."""
        token = Key("token", group)

        def body(env: dict[Key, Any]) -> dict[Key, Any]:
            return {**self.body(env), token: env[token] + 1}

        return LocalProgram(label=self.label, reads=(*self.reads, token), writes=(*self.writes, token), body=body)
