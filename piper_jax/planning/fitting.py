"""Stages that fit into memory: boundaries between them move until every device holds what it needs, or none helps.

The schedule says what is alive at once, so each cut that is tried is planned and simulated as a whole. The search goes
on from the cut that is nearest to fitting; of those that fit, the first ones found are few moves away from the one
whose largest stage is least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from piper_jax.errors import PlanError
from piper_jax.ir.columns import bytes_text
from piper_jax.planning.plan import Plan

Stages = tuple[tuple[int, ...], ...]
MAX_TRIALS = 100


@dataclass(frozen=True, slots=True)
class _Trial:
    """A cut and its plan, and what is compared: bytes too many over all groups, then the largest stage's work."""

    stages: Stages
    plan: Plan
    peaks: dict[str, int]
    excess: int
    largest: int

    @property
    def key(self) -> tuple[int, int, int]:
        """The fullest group counts first, so that moves lead through cuts that are as bad in all."""
        return max(self.peaks.values()) if self.excess else 0, self.excess, self.largest


def fitted(traced: Plan, first: Plan, limit: int, planned: Callable[[Stages], Plan]) -> Plan:
    """A plan whose devices hold at most ``limit`` bytes by the simulator's count.

    Args:
      traced: the plan before any directive.
      first: the plan with the cut that is best for time.
      planned: a cut, as units of each stage, -> its plan.

    Raises:
      PlanError: no cut that was tried fits; names the best one and what it needs.
    """
    start = _tried(_stages_of(traced, first), first, limit)
    best, waiting, seen = start, [start], {start.stages}
    while best.excess and waiting and len(seen) < MAX_TRIALS:
        nearest = min(waiting, key=lambda trial: trial.key)
        waiting.remove(nearest)
        following = [cut for cut in _neighbours(nearest, limit) if cut not in seen]
        seen.update(following)
        waiting += [_tried(cut, planned(cut), limit) for cut in following]
        best = min([best, *waiting], key=lambda trial: trial.key)
    if best.excess:
        raise _none_fits(best, limit)
    return best.plan


def _none_fits(best: _Trial, limit: int) -> PlanError:
    over = {g: n for g, n in best.peaks.items() if n > limit}
    return PlanError(
        f"no cut into {len(best.stages)} stages was found with {bytes_text(limit)} on each device.",
        detail=[f"{group} needs {bytes_text(needed)} in the best one" for group, needed in over.items()],
        help=f"memory_limit={max(best.peaks.values())} fits; or more stages, ActivationCheckpointing, a higher "
        "zero_stage, or more microbatches.",
    )


def _stages_of(traced: Plan, made: Plan) -> Stages:
    """The units, as the traced plan numbers them, of each stage."""
    number = {unit: op.PP for op in traced.dag.ops.values() for unit in op.units}
    found: dict[int, set[int]] = {}
    for op in made.dag.ops.values():
        if op.PP is not None:
            found.setdefault(op.PP, set()).update(pp for unit in op.units if (pp := number[unit]) is not None)
    return tuple(tuple(sorted(found[stage])) for stage in sorted(found))


def _tried(stages: Stages, plan: Plan, limit: int) -> _Trial:
    from piper_jax.simulation import simulate

    peaks = {group.name: group.memory.needed_bytes for group in simulate(plan).groups}
    work: dict[int | None, int] = {}
    for op in plan.dag.ops.values():
        work[op.PP] = work.get(op.PP, 0) + op.flops
    excess = sum(max(needed - limit, 0) for needed in peaks.values())
    return _Trial(stages, plan, peaks, excess, max(work.values()))


def _neighbours(trial: _Trial, limit: int) -> Iterator[Stages]:
    """Cuts that take a unit, or half of the units, from a stage of a group that holds too much."""
    over = {group for group, needed in trial.peaks.items() if needed > limit}
    nodes = trial.plan.dag.nodes.values()
    crowded = {n.id.PP for n in nodes if n.group in over and n.id.PP is not None}
    for stage in sorted(crowded):
        for count in dict.fromkeys((1, len(trial.stages[stage]) // 2)):
            if 0 < count < len(trial.stages[stage]):
                yield from _given_away(trial.stages, stage, count)


def _given_away(stages: Stages, stage: int, count: int) -> Iterator[Stages]:
    own: Sequence[int] = stages[stage]
    if stage > 0:
        before, kept = (*stages[stage - 1], *own[:count]), tuple(own[count:])
        yield (*stages[: stage - 1], before, kept, *stages[stage + 1 :])
    if stage + 1 < len(stages):
        kept, after = tuple(own[:-count]), (*own[-count:], *stages[stage + 1])
        yield (*stages[:stage], kept, after, *stages[stage + 2 :])
