"""Runs a list of instructions on numbered registers. Knows nothing of strategies, stages or models."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from piper_jax.lowering.instruction import Instruction, last_uses
from piper_jax.lowering.keys import Key

MAX_IN_FLIGHT = 16


class Executor:
    """A straight-line program: each instruction reads and writes registers; dead ones are freed at their last use.

    Dispatch is asynchronous: no instruction waits for the values of another one. Where groups hand on tokens, at most
    ``MAX_IN_FLIGHT`` programs of a group are dispatched ahead of what it has finished, half of what a CPU device takes
    before it blocks.

    Args:
      wanted: registers to keep.
      consumed: given registers that are deleted after their last use, though the caller still refers to them.

    Attributes:
      at: number of the instruction that is being dispatched; None between runs.
    """

    def __init__(self, instructions: Sequence[Instruction], wanted: Sequence[Key], consumed: Sequence[Key] = ()):
        self.instructions, self.wanted = tuple(instructions), tuple(wanted)
        self.index: dict[Key, int] = {}
        for instruction in instructions:
            for key in (*instruction.reads, *instruction.writes):
                self.index.setdefault(key, len(self.index))
        for key in wanted:
            self.index.setdefault(key, len(self.index))
        owned = set(consumed)
        self._table = [
            (
                _direct(i),
                self._numbers(i.reads),
                self._numbers(i.writes),
                self._numbers(dead),
                self._numbers([k for k in dead if k in owned.difference(i.overwrites)]),
                self._tokens(i),
            )
            for i, dead in zip(instructions, last_uses(instructions, wanted), strict=True)
        ]
        self.at: int | None = None
        self._ahead: dict[int, deque[Any]] = {self.index[k]: deque() for k in self.index if k.kind == "token"}

    def _numbers(self, keys: Sequence[Key]) -> tuple[int, ...]:
        return tuple(self.index[k] for k in keys)

    def _tokens(self, instruction: Instruction) -> tuple[int, ...]:
        return self._numbers([k for k in instruction.writes if k.kind == "token"])

    @cached_property
    def inputs(self) -> tuple[Key, ...]:
        """Keys that must be given: read before any instruction writes them."""
        written: set[Key] = set()
        needed: dict[Key, None] = {}
        for instruction in self.instructions:
            needed.update(dict.fromkeys(k for k in instruction.reads if k not in written))
            written.update(instruction.writes)
        return tuple(needed)

    def run(self, given: Mapping[Key, Any]) -> dict[Key, Any]:
        """Dispatches all instructions.

        Args:
          given: arrays for ``inputs`` (keys that nothing reads are ignored).

        Returns:
          The final values of ``wanted``.
        """
        registers: list[Any] = [None] * len(self.index)
        for key, value in given.items():
            if key in self.index:
                registers[self.index[key]] = value
        for number, (call, reads, writes, dead, gone, tokens) in enumerate(self._table):
            self.at = number
            results = call(*[registers[i] for i in reads])
            for i, result in zip(writes, results, strict=True):
                registers[i] = result
            for i in tokens:
                ahead = self._ahead[i]
                ahead.append(registers[i])
                if len(ahead) > MAX_IN_FLIGHT:
                    ahead.popleft().block_until_ready()
            for i in gone:
                registers[i].delete()
            for i in dead:
                registers[i] = None
        self.at = None
        return {key: registers[self.index[key]] for key in self.wanted}


def _direct(instruction: Instruction) -> Callable[..., Sequence[Any]]:
    """What is called each step, once its program is compiled: the executable itself where nothing else is done."""
    executable = instruction.program.executable if instruction.program is not None else None
    return executable if executable is not None and instruction.call is instruction.program else instruction.call
