"""Measured costs of a compiled plan: a few timed calls of each distinct program and transfer, alone and together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import jax

from piper_jax.ir.dag import Dag
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Compute
from piper_jax.lowering.instruction import Instruction, last_uses
from piper_jax.lowering.keys import Key
from piper_jax.simulation.costs import MeasuredCosts
from piper_jax.simulation.costs.measured import paying
from piper_jax.simulation.sharing import sharing_of

TURNS = 4

Signature = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An instruction with the arrays that it read in a real step; may be called any number of times.

    Attributes:
      signature: equal for what costs the same: calls of one program, transfers of equal arrays.
      groups: the groups that take part.
      overwritten: positions of the inputs whose buffers the call takes over.
    """

    instruction: Instruction
    signature: Signature
    arrays: tuple[Any, ...]
    groups: tuple[str, ...]
    overwritten: tuple[int, ...]

    @classmethod
    def of(cls, instruction: Instruction, arrays: tuple[Any, ...]) -> Call:
        """``instruction`` on ``arrays``."""
        program = instruction.program
        if program is None:
            signature = instruction.role, *((a.shape, str(a.dtype), len(a.devices())) for a in arrays)
            overwritten = ()
        else:
            signature = instruction.role, program.digest
            infos = program.executable.args_info[0] if instruction.call is program else None
            # What joins its arrays before it calls the program may lose any of them.
            overwritten = tuple(k for k in range(len(arrays)) if infos is None or infos[k].donated)
        groups = tuple(dict.fromkeys(k.group for k in (*instruction.reads, *instruction.writes)))
        return cls(
            instruction=instruction, signature=signature, arrays=arrays, groups=groups, overwritten=overwritten
        )  # fmt: skip

    @property
    def is_repeatable(self) -> bool:
        """Whether it writes anew all that it overwrites."""
        return {self.instruction.reads[k] for k in self.overwritten} <= set(self.instruction.writes)

    def copies(self) -> list[Any]:
        """Copies of the arrays that the call overwrites."""
        found = [self.arrays[k] for k in self.overwritten]
        return [jax.device_put(a, a.sharding, may_alias=False) for a in found]

    def inputs(self) -> list[Any]:
        """The arrays, with copies of those that the call overwrites; all of them there."""
        arrays = list(self.arrays)
        for k, copy in zip(self.overwritten, self.copies(), strict=True):
            arrays[k] = copy
        return jax.block_until_ready(arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One step, kept as calls.

    Attributes:
      calls: the first of each signature on each set of groups, in dispatch order.
      signatures: of all instructions, in dispatch order.
      results: the registers that were wanted.
    """

    calls: tuple[Call, ...]
    signatures: tuple[Signature, ...]
    results: Mapping[Key, Any]

    @property
    def distinct(self) -> tuple[Call, ...]:
        """The first call of each signature."""
        return tuple({call.signature: call for call in reversed(self.calls)}.values())[::-1]

    def lanes(self, dag: Dag) -> tuple[tuple[Call, ...], ...]:
        """For each group, its distinct programs with passes in them."""
        lanes: dict[tuple[str, ...], list[Call]] = {}
        for call in self.calls:
            if any(isinstance(dag.nodes[n], Compute) for n in call.instruction.nodes):
                lanes.setdefault(call.groups, []).append(call)
        return tuple(map(tuple, lanes.values()))


def record(instructions: Sequence[Instruction], given: Mapping[Key, Any], wanted: Sequence[Key]) -> Recording:
    """Runs a step, one instruction after another; nothing that is given is consumed."""
    registers, calls, signatures = dict(given), dict[tuple[Any, ...], Call](), list[Signature]()
    for instruction, dead in zip(instructions, last_uses(instructions, wanted), strict=True):
        call = Call.of(instruction, tuple(registers[k] for k in instruction.reads))
        calls.setdefault((call.signature, call.groups), call)
        signatures.append(call.signature)
        results = jax.block_until_ready(instruction.call(*call.inputs()))
        registers.update(zip(instruction.writes, results, strict=True))
        for key in dead:
            registers.pop(key, None)
    results = {k: registers[k] for k in wanted}
    return Recording(calls=tuple(calls.values()), signatures=tuple(signatures), results=results)


def measure(
    dag: Dag, instructions: Sequence[Instruction], recording: Recording, outside: Callable[[], Any], rounds: int
) -> MeasuredCosts:
    """Times each distinct call alone, all passes together, and ``outside``, in turn, ``rounds`` times.

    Args:
      dag: completed; what no instruction of its own runs (a receive, a collective inside a program) costs nothing.
      outside: what a step does besides its instructions.
    """
    distinct, lanes = recording.distinct, recording.lanes(dag)
    mixed = [call for turn in zip_longest(*lanes) for call in turn if call is not None]
    alone: dict[Signature, list[float]] = {call.signature: [] for call in distinct}
    together, around = list[float](), list[float]()
    for _ in range(rounds + 1):
        for call in distinct:
            alone[call.signature].append(_seconds(call))
        together.append(_seconds_together(mixed, TURNS) / TURNS)
        around.append(_elapsed(outside))
    seconds = {signature: statistics.median(found[1:]) for signature, found in alone.items()}
    costs: dict[NodeId, float] = dict.fromkeys(dag.nodes, 0.0)
    extra = statistics.median(around[1:])
    for instruction, signature in zip(instructions, recording.signatures, strict=True):
        paid = paying(dag, instruction.nodes)
        costs.update(dict.fromkeys(paid, seconds[signature] / max(1, len(paid))))
        extra += 0.0 if instruction.nodes else seconds[signature]
    sums = [sum(seconds[call.signature] for call in lane) for lane in lanes]
    return MeasuredCosts(
        seconds=costs,
        num_processors=sharing_of(sums, statistics.median(together[1:])),
        outside_seconds=extra,
    )


def _seconds(call: Call) -> float:
    """From the call until its results are there."""
    arrays = call.inputs()
    return _elapsed(lambda: call.instruction.call(*arrays))


def _seconds_together(calls: Sequence[Call], turns: int) -> float:
    """``turns`` times all calls without waiting; as in a step, gradients are added to the same buffers every time."""
    owned: dict[Key, Any] = {}
    for call in calls:
        for k, array in zip(call.overwritten, call.copies(), strict=True):
            owned.setdefault(call.instruction.reads[k], array)
    spare = [call.copies() if not call.is_repeatable else [] for _ in range(turns) for call in calls]
    jax.block_until_ready((list(owned.values()), spare))

    def run() -> list[Any]:
        last: dict[Key, Any] = {}
        for copies, call in zip(spare, [*calls] * turns, strict=True):
            reads, writes = call.instruction.reads, call.instruction.writes
            handed_on = zip(reads, call.arrays, strict=True)
            arrays = [last.get(key, a) if key.kind == "token" else a for key, a in handed_on]
            for position, k in enumerate(call.overwritten):
                arrays[k] = copies[position] if copies else owned[reads[k]]
            last.update(zip(writes, call.instruction.call(*arrays), strict=True))
            if not copies:
                owned.update((reads[k], last[reads[k]]) for k in call.overwritten)
        return [*last.values()]

    return _elapsed(run)


def _elapsed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin
