"""Short names of spans and rows, shared by the text grid and the pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence

from piper_jax.ir.ids import NodeId
from piper_jax.simulation.report import GroupReport, Report, Span

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
TASK = re.compile(r"(\d*[A-Z]+)(\d+)")


def task_label(nodes: Sequence[NodeId], *, several_stages: bool) -> str:
    """``"F0"``, or ``"2F0"`` with the stage first where a group holds several, ``"F1+B0"`` for an overlap slot.

    The form with the stage is that of torch.distributed.pipelining. Ops of one stage (dense, experts) are one task.
    """
    tasks: dict[str, None] = {}
    for node in nodes:
        stage = str(node.PP) if several_stages and node.PP is not None else ""
        microbatch = "" if node.MB is None else str(node.MB)
        tasks[f"{stage}{node.PASS or node.op}{microbatch}"] = None
    return "+".join(tasks)


def span_label(span: Span, *, several_stages: bool) -> str:
    """What to write on a span: its task, or its kind for communication."""
    return task_label(span.nodes, several_stages=several_stages) if span.kind in ("compute", "update") else span.kind


def has_several_stages(report: Report) -> bool:
    """Whether some group runs more than one stage, so that labels need the stage."""
    return any(len(group.stages) > 1 for group in report.groups)


def written(label: str, wide: float, tall: int) -> str:
    """As much of ``label`` as has room: ``2F10``, ``2F`` over ``10``, the microbatch alone, or nothing.

    Args:
      wide, tall: room in characters and in lines.
    """
    found = TASK.fullmatch(label)
    if len(label) <= wide:
        return label
    if found is None or len(found[2]) > wide:
        return ""
    return f"{found[1]}\n{found[2]}" if tall >= 2 and len(found[1]) <= wide else found[2]


def label_note(several_stages: bool) -> str:
    """How a label reads."""
    alone = "; a number alone is the microbatch"
    return ("2F0 is forward of microbatch 0 on stage 2" if several_stages else "F0 is forward of microbatch 0") + alone


def joined_notes(report: Report) -> list[str]:
    """What to say of programs that were timed whole, if there are any."""
    found = any(span.joined for span in report.timeline)
    return ["a program of several tasks was timed whole: each is drawn with an equal share"] if found else []


def group_lines(group: GroupReport) -> tuple[str, ...]:
    """What names a row: ``g0`` over ``stages 0, 7``."""
    if not group.stages:
        return (group.name,)
    several = len(group.stages) > 3
    numbers = f"{group.stages[0]} ... {group.stages[-1]}" if several else ", ".join(map(str, group.stages))
    return group.name, f"stages {numbers}" if len(group.stages) > 1 else f"stage {numbers}"


def row_names(names: Sequence[str]) -> list[str]:
    """Names of groups for rows: ``g0, g1, ...`` shorten to ``0, 1, ...``."""
    short = all(name[:1] == "g" and name[1:].isdigit() for name in names)
    return [name[1:] if short else name for name in names]


def time_text(time: float, unit: str, *, like: float | None = None) -> str:
    """``"18"`` ticks, or ``"12.3 ms"``; in the unit of ``like``, the longest time on an axis, where that is given."""
    if unit != "s":
        return f"{time:.10g}" if abs(time - round(time)) < 1e-6 else f"{time:.3f}"
    longest = time if like is None else like
    if longest <= 0:
        return "0 s"
    scale, name = next(((s, n) for s, n in SECONDS if longest >= s), SECONDS[-1])
    return f"{time / scale:.4g} {name}"


def flops_text(count: float) -> str:
    """``"7.7 MFLOP"``, in powers of 1000."""
    for power, name in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {name}FLOP"
    return f"{count:.0f} FLOP"
