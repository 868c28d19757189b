"""What the executor runs: instructions on named registers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from piper_jax.errors import RuntimeFault
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


def require_unspoiled(instructions: Iterable[Instruction]) -> None:
    """What an instruction reads, none before it has overwritten: on devices that would end the process.

    Raises:
      RuntimeFault: one is dispatched too late; the order of the plan and what its nodes write do not agree.
    """
    taken: dict[Key, Instruction] = {}
    for instruction in instructions:
        for key in instruction.reads:
            if key in taken:
                raise RuntimeFault(
                    f"compile: {instruction.label} reads {key.kind} {key.item} on {key.group}, whose memory "
                    f"{taken[key].label} has taken over.",
                    help="this is a fault of piper-jax; please report it with the plan (plan.save) and the model.",
                )
        taken.update(dict.fromkeys(instruction.overwrites, instruction))
        for key in instruction.writes:
            taken.pop(key, None)
