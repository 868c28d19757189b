"""All processes have compiled all programs before the first of them sends anything."""

from __future__ import annotations

from collections.abc import Iterable

from piper_jax.lowering.instruction import Instruction
from piper_jax.processes.coordination import coordination


def meet_compiled(instructions: Iterable[Instruction], name: str, seconds: float) -> None:
    """Waits for this process's executables, then for the other processes.

    A program that one process compiles while others already wait for it in a collective looks like a stuck process;
    where two processes do so crosswise, it is a deadlock.

    Raises:
      ProcessFault: a process did not come within ``seconds``.
    """
    for instruction in instructions:
        if instruction.program is not None:
            _ = instruction.program.executable
    found = coordination()
    if found is not None:
        found.meet(name, seconds)
