"""Puts a report together from what was simulated or measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Compute
from piper_jax.ir.text import whole_lines
from piper_jax.simulation.report import GroupMemory, GroupReport, Report, Span
from piper_jax.simulation.topology import compute_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a report is made of.

    Attributes:
      intervals: when each group computes.  busy: time in use by group and stream.  memory: by group.
    """

    spans: Sequence[Span]
    makespan: float
    intervals: Mapping[str, list[tuple[float, float]]]
    busy: Mapping[str, Mapping[str, float]]
    memory: Mapping[str, GroupMemory] = field(default_factory=dict[str, GroupMemory])
    critical_path: Sequence[Span] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """Words of a report that do not follow from its times; as in :class:`Report`."""

    title: str
    costs: str
    time_unit: str
    device_bytes: int | None = None


def assemble(dag: Dag, found: Findings, heading: Heading) -> Report:
    """The report on a completed ``dag``."""
    groups = _groups(dag, found)
    idle = sum(group.bubble * len(group.devices) for group in groups)
    return Report(
        title=heading.title,
        costs=heading.costs,
        time_unit=heading.time_unit,
        device_bytes=heading.device_bytes,
        num_stages=len({op.PP for op in dag.ops.values() if op.PP is not None}),
        num_microbatches=dag.num_microbatches,
        makespan=found.makespan,
        bubble=idle / max(1, sum(len(group.devices) for group in groups)),
        groups=groups,
        timeline=tuple(found.spans),
        critical_path=tuple(found.critical_path),
        sources={op.name: "  ".join(filter(None, (op.path, op.source))) for op in dag.ops.values()},
        notes=tuple(whole_lines(dag)),
    )


def _groups(dag: Dag, found: Findings) -> tuple[GroupReport, ...]:
    stages: dict[str, set[int]] = defaultdict(set)
    for node in dag.nodes.values():
        if isinstance(node, Compute) and node.id.PP is not None:
            stages[node.group or ""].add(node.id.PP)
    return tuple(
        GroupReport(
            name=name,
            devices=dag.groups[name].devices,
            stages=tuple(sorted(stages[name])),
            bubble=1.0 - covered_time(found.intervals.get(name, ())) / found.makespan if found.makespan else 0.0,
            busy=dict(found.busy.get(name, {})),
            memory=found.memory.get(name, GroupMemory()),
        )
        for name in compute_groups(dag)
    )


def covered_time(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of ``intervals``."""
    total, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
