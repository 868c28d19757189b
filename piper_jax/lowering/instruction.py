"""What the executor runs: instructions on named registers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from piper_jax.ir.ids import NodeId
from piper_jax.lowering.keys import Key
from piper_jax.lowering.programs import Compiled

Role = Literal["prologue", "compute", "transfer", "reduce", "joint", "update", "exchange", "metrics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One dispatch: ``call(*registers in reads) -> values for writes``; ``program`` is set where XLA runs.

    ``overwrites``: those of ``reads`` whose memory the results take over.
    """

    role: Role
    label: str
    call: Callable[..., Sequence[Any]]
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    nodes: tuple[NodeId, ...] = ()
    program: Compiled | None = None
    overwrites: tuple[Key, ...] = ()


def last_uses(instructions: Sequence[Instruction], kept: Iterable[Key]) -> list[tuple[Key, ...]]:
    """For each instruction, the registers that nothing reads after it and that are not ``kept``."""
    live = set(kept)
    frees: list[tuple[Key, ...]] = []
    for instruction in reversed(instructions):
        touched = dict.fromkeys((*instruction.reads, *instruction.writes))
        frees.append(tuple(k for k in touched if k not in live))
        live.difference_update(instruction.writes)
        live.update(instruction.reads)
    return frees[::-1]
