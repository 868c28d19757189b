"""Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is that of the "Trace Event Format" document: complete events (X) on one process per device group and one
thread per stream, counters (C) for memory, flow events (s, f) from each send to its receive. One tick of an abstract
clock is shown as one millisecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from piper_jax.simulation.report import MEMORY_KINDS, Report, Span
from piper_jax.visualization.labels import has_several_stages, span_label
from piper_jax.visualization.scene import scene_of

Event = dict[str, Any]
MICROSECONDS = {"s": 1e6, "": 1e3}


def save_trace(report: Report, path: Path, measured: Report | None = None) -> None:
    """Writes the trace of ``report``, and that of ``measured`` as further processes."""
    path.write_text(trace_text(report, measured), encoding="utf-8")


def trace_text(report: Report, measured: Report | None = None) -> str:
    """The trace as JSON, an event a line."""
    events = list(trace_events(report))
    if measured is not None:
        events += trace_events(measured, first_process=1 + len(report.groups), suffix=" measured")
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def trace_events(report: Report, *, first_process: int = 1, suffix: str = "") -> Iterator[Event]:
    """The events of one report; ``first_process`` is the number of its first group."""
    scale = MICROSECONDS[report.time_unit]
    processes = {group.name: first_process + number for number, group in enumerate(report.groups)}
    threads = {(lane.group, lane.stream): number for number, lane in enumerate(scene_of(report).lanes)}
    for name, process in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name + suffix}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for (group, stream), thread in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": processes[group], "tid": thread, "args": {"name": stream}}
    several_stages = has_several_stages(report)
    for span in report.timeline:
        place = {"pid": processes[span.group], "tid": threads[span.group, span.stream]}
        yield {
            "ph": "X", "name": span_label(span, several_stages=several_stages), "cat": span.kind, **place,
            "ts": span.start * scale, "dur": (span.end - span.start) * scale, "args": _facts(report, span, scale),
        }  # fmt: skip
        yield from _flow(span, place, scale)
    for group in report.groups:
        for step in group.memory.steps:
            kinds = dict(zip(MEMORY_KINDS, step[1:], strict=False))
            yield {"ph": "C", "name": "memory", "pid": processes[group.name], "ts": step.time * scale, "args": kinds}


def _facts(report: Report, span: Span, scale: float) -> Event:
    facts: Event = {"nodes": [str(node) for node in span.nodes]}
    source = report.sources.get(span.nodes[0].op)
    if source:
        facts["source"] = source
    if span.nbytes:
        facts["bytes_per_device"] = span.nbytes
    if span.blocked:
        facts["waited_us"] = span.blocked * scale
    return facts


def _flow(span: Span, place: Event, scale: float) -> Iterator[Event]:
    """An arrow from a send to the receive of the same name and coordinates."""
    if span.kind not in ("send", "recv"):
        return
    node = span.nodes[0]
    name = str(node._replace(op=node.op.removeprefix(span.kind)))
    way = {"ph": "s"} if span.kind == "send" else {"ph": "f", "bp": "e"}
    yield {**way, "name": "transfer", "cat": "transfer", "id": name, **place, "ts": span.start * scale}
