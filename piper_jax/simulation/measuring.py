"""A report of a step as it ran: the same tables and pictures for measured times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import groupby

from piper_jax.ir.dag import Dag
from piper_jax.ir.ids import NodeId
from piper_jax.planning.completion import complete
from piper_jax.planning.plan import Plan
from piper_jax.simulation.assembly import Findings, Heading, assemble
from piper_jax.simulation.report import GroupMemory, Report, Span


def measured_report(
    plan: Plan | Dag,
    timeline: Iterable[Span],
    *,
    memory: Mapping[str, GroupMemory] | None = None,
    title: str = "",
) -> Report:
    """The report of spans that were measured, to be printed, drawn and compared like a simulated one.

    Args:
      plan: the plan that ran, or its Dag.
      timeline: spans with times in seconds on one clock; the earliest start becomes 0.
      memory: measured memory by group, on the same clock as the report, if known.
      title: heading of the report.
    """
    spans = sorted(timeline, key=lambda span: (span.start, span.group))
    origin = spans[0].start if spans else 0.0
    dag = complete(plan) if isinstance(plan, Dag) else plan.complete()
    slot_of: dict[NodeId, object] = {node: number for number, slot in enumerate(dag.slots) for node in slot.nodes}
    spans = [
        span._replace(start=span.start - origin, end=span.end - origin, joined=_joined(span, slot_of)) for span in spans
    ]
    busy: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    intervals: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        busy[span.group][span.stream] += span.end - span.start
        if span.kind in ("compute", "update"):
            intervals[span.group].append((span.start, span.end))
    found = Findings(
        spans=spans,
        makespan=max((span.end for span in spans), default=0.0),
        intervals=intervals,
        busy=busy,
        memory=memory or {},
    )
    return assemble(dag, found, Heading(title=title, costs="measured", time_unit="s"))


def _joined(span: Span, slot_of: Mapping[NodeId, object]) -> tuple[int, ...]:
    """How many nodes of each slot are in a computing span of several; without slots, of each pass and microbatch."""
    if span.kind not in ("compute", "update"):
        return ()
    slots = [slot_of.get(node, (node.PASS, node.PP, node.MB)) for node in span.nodes]
    counts = tuple(len(list(run)) for _, run in groupby(slots))
    return counts if len(counts) > 1 else ()
