"""What a simulation found: times, bubbles, the critical path and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from piper_jax.ir.ids import NodeId

MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "transfers", "batch")
"""State, accumulated gradients, optimizer state, values kept on the group, values on their way between groups, and what
the group reads of the batch."""


class Span(NamedTuple):
    """One program or one communication on one stream of one group.

    Attributes:
      kind: ``"compute"``, ``"update"``, ``"send"``, ``"recv"`` or the kind of a collective.
      nodes: what runs; several where an overlap slot or a fused program runs them together.
      start, end: in the report's unit of time.
      blocked: how long it held its stream before ``start``, waiting for its link or its data.
      nbytes: bytes on one device that it moves, or that a forward keeps for its backward.
      joined: where a program that was measured whole is several slots of the plan, one after another: how many of the
        nodes each has.
    """

    group: str
    stream: str
    kind: str
    nodes: tuple[NodeId, ...]
    start: float
    end: float
    blocked: float = 0.0
    nbytes: int = 0
    joined: tuple[int, ...] = ()


class MemoryStep(NamedTuple):
    """Bytes of one device by kind, from ``time`` until the next step.

    Attributes:
      inside: what the running program makes and uses up, beside the arrays above: such as residuals where a forward and
        its backward are one program. An upper bound, since it is XLA's affair; not measured, and not in the total.
    """

    time: float
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    transfers: int
    batch: int = 0
    inside: int = 0

    @property
    def total_bytes(self) -> int:
        """All kinds together."""
        return sum(self[1:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """Memory of one device of a group over the step.

    Attributes:
      steps: by time.
      peak: the first step at which the total is largest: when, and how much of each kind.
    """

    steps: tuple[MemoryStep, ...] = ()
    peak: MemoryStep = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        peak = max(self.steps, key=lambda step: step.total_bytes, default=MemoryStep(0.0, 0, 0, 0, 0, 0))
        object.__setattr__(self, "peak", peak)

    @property
    def peak_bytes(self) -> int:
        """The largest total: of arrays, as a profile measures it."""
        return self.peak.total_bytes

    @property
    def needed_bytes(self) -> int:
        """The largest total with what lies inside the programs: what a device should have."""
        return max((step.total_bytes + step.inside for step in self.steps), default=0)

    def peak_of_kind(self, kind: str) -> MemoryStep:
        """The first step at which ``kind``, one of ``MEMORY_KINDS``, is largest."""
        position = 1 + MEMORY_KINDS.index(kind)
        return max(self.steps, key=lambda step: step[position], default=MemoryStep(0.0, 0, 0, 0, 0, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One device group.

    Attributes:
      devices: its logical device ids.
      stages: the pipeline stages that run on it.
      bubble: share of the makespan in which it computes nothing, in [0, 1].
      busy: time in use of each stream, by name.
      memory: of one of its devices.
    """

    name: str
    devices: tuple[int, ...]
    stages: tuple[int, ...]
    bubble: float
    busy: Mapping[str, float]
    memory: GroupMemory


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """One training step, simulated or measured.

    Attributes:
      title: name of the schedule or the plan.
      costs: the cost model in words.
      time_unit: ``"s"``, or ``""`` for abstract ticks.
      makespan: from the start of the step to the end of its last node.
      bubble: share of all device time in which nothing is computed, in [0, 1].
      groups: one entry for each group that computes.
      timeline: everything that takes time, by start.
      critical_path: spans that end just when the next one starts; shortening none of them leaves the makespan.
      device_bytes: memory of one device, if the hardware is known.
      sources: module path and source line of each op, for display.
      notes: further lines of text, such as which backwards stay whole under an order of halves.
    """

    title: str
    costs: str
    time_unit: str
    num_stages: int
    num_microbatches: int
    makespan: float
    bubble: float
    groups: tuple[GroupReport, ...]
    timeline: tuple[Span, ...]
    critical_path: tuple[Span, ...] = ()
    device_bytes: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The largest memory of any device, in arrays."""
        return max((group.memory.peak_bytes for group in self.groups), default=0)

    @property
    def needed_bytes(self) -> int:
        """The largest memory that any device should have, with what lies inside programs."""
        return max((group.memory.needed_bytes for group in self.groups), default=0)

    def group(self, name: str) -> GroupReport:
        """The group of that name; KeyError if there is none."""
        return {group.name: group for group in self.groups}[name]

    def __str__(self) -> str:
        from piper_jax.visualization.summary import summary_text

        return summary_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from piper_jax.visualization.notebook import report_html

        return report_html(self)
