"""A report of a step as it ran: the same tables and pictures for measured times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from piper_jax.ir.dag import Dag
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
    spans = [span._replace(start=span.start - origin, end=span.end - origin) for span in spans]
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
    dag = complete(plan) if isinstance(plan, Dag) else plan.complete()
    return assemble(dag, found, Heading(title=title, costs="measured", time_unit="s"))
