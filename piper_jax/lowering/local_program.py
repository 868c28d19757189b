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
