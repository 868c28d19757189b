"""Memory of one device of each group over time, by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from piper_jax.ir.dag import Dag
from piper_jax.ir.fusion import programs
from piper_jax.ir.ids import NodeId
from piper_jax.simulation.registers import GIVEN, Registers
from piper_jax.simulation.report import MEMORY_KINDS, GroupMemory, MemoryStep
from piper_jax.simulation.topology import compute_groups

Change = tuple[int, bool, int, int]  # position of a program, whether it has ended, bytes, kind


def memory_of_groups(dag: Dag, interval: Callable[[NodeId], tuple[float, float]]) -> dict[str, GroupMemory]:
    """The memory of one device of each computing group, after each program that the runtime dispatches.

    The order of the changes is that of dispatch, in which a device gives out memory; only their times are those of the
    clock. An array lives from the start of the program that makes it (a received one: of its transfer) to the end of
    the last one that reads it. What one program makes and uses up counts apart, as ``inside``.

    Args:
      interval: start and end of the program that a node is part of.
    """
    order = programs(dag)
    changes: dict[str, list[Change]] = defaultdict(list)
    for group, start, end, nbytes, kind in Registers(dag, order).all():
        if nbytes and start <= end:
            changes[group].append((start, False, nbytes, kind))
            changes[group].append((end, True, -nbytes, kind))

    def time(position: int, ended: bool) -> float:
        if position == GIVEN:
            return 0.0
        intervals = [interval(node) for node in order[position].nodes]
        return max(end for _, end in intervals) if ended else min(start for start, _ in intervals)

    return {group: _timeline(changes[group], len(order), time) for group in compute_groups(dag)}


def _timeline(changes: list[Change], stays: int, time: Callable[[int, bool], float]) -> GroupMemory:
    """Adds up the changes. Of several states at one instant those stay that a later one does not exceed."""
    changes.sort()
    counts = [0] * (len(MEMORY_KINDS) + 1)
    steps: list[MemoryStep] = []
    now, k = 0.0, 0
    while k < len(changes) and changes[k][0] < stays:
        moment = changes[k][:2]
        while k < len(changes) and changes[k][:2] == moment:
            counts[changes[k][3]] += changes[k][2]
            k += 1
        now = max(now, time(*moment))
        step = MemoryStep(now, *counts)
        if (
            steps
            and now == steps[-1].time
            and step.total_bytes >= steps[-1].total_bytes
            and step.inside >= steps[-1].inside
        ):
            steps[-1] = step
        elif not steps or step[1:] != steps[-1][1:]:
            steps.append(step)
    return GroupMemory(steps=tuple(steps))
