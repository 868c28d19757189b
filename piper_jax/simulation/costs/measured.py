"""Measured costs: a table of seconds, from a few timed calls of each distinct program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Annotated

from piper_jax.arguments import require_fields
from piper_jax.errors import ConfigError
from piper_jax.hints import From
from piper_jax.ir.dag import Dag
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Compute, Node, Recv, Update
from piper_jax.simulation.costs.base import Cost, CostModel
from piper_jax.simulation.hardware import require_numbers
from piper_jax.simulation.report import Span

CostKey = NodeId | tuple[str, str]
Seconds = Annotated[float, From(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts(CostModel):
    """Seconds by node, or by op and pass: finite numbers from 0.

    Attributes:
      seconds: by ``NodeId`` (looked up first) or by ``(op, PASS)``.
      fallback: for nodes that the table lacks; None makes a missing computation an error and communication free.
      num_processors: how many groups compute at full speed at once. None: the costs hold however many groups run,
        because each has its own processor, or because they were measured under contention.
      outside_seconds: what a step takes besides its nodes, such as placing the batch and gathering metrics. It is no
        part of a makespan.
      origin: what headings say of the table.
    """

    seconds: Mapping[CostKey, Seconds] = field(default_factory=dict[CostKey, float])
    fallback: CostModel | None = None
    num_processors: float | None = None
    outside_seconds: Seconds = 0.0
    origin: str = "measured"

    def __post_init__(self) -> None:
        require_fields(self, ConfigError, "MeasuredCosts: ")
        if self.num_processors is not None:
            require_numbers("MeasuredCosts", above=0, num_processors=self.num_processors)
        require_numbers("MeasuredCosts", outside_seconds=self.outside_seconds)
        for key, seconds in self.seconds.items():
            name = str(key) if isinstance(key, NodeId) else repr(key)
            require_numbers("MeasuredCosts", **{f"seconds of {name}": seconds})

    @classmethod
    def from_timeline(cls, timeline: Iterable[Span], *, fallback: CostModel | None = None) -> MeasuredCosts:
        """Means over a measured timeline: equal programs share their mean, which their computations share evenly.

        A transfer costs its Send all of its mean.
        """
        totals: dict[tuple[tuple[str, str | None], ...], list[float]] = {}
        spans = list(timeline)
        for span in spans:
            totals.setdefault(_program(span), []).append(span.end - span.start)
        seconds: dict[CostKey, float] = {}
        for span in spans:
            durations = totals[_program(span)]
            for node in span.nodes:
                shares = 1 if span.kind == "send" else len(span.nodes)
                seconds[node] = sum(durations) / len(durations) / shares
        return cls(seconds=seconds, fallback=fallback)

    def describe(self, passes: Set[str]) -> str:
        """``"measured"``, or where else they are from, with the processors that groups share."""
        return self.origin + ("" if self.num_processors is None else f", {self.num_processors:.2f} groups at once")

    @property
    def concurrency(self) -> float | None:
        """``num_processors``."""
        return self.num_processors

    @property
    def device_bytes(self) -> int | None:
        """That of the fallback."""
        return self.fallback.device_bytes if self.fallback else None

    def bind(self, dag: Dag) -> Callable[[Node], Cost]:
        """The cost function for the nodes of ``dag``.

        Raises:
          ConfigError: the table has no entry for a computation and there is no fallback (when that node is asked for).
        """
        fallback = self.fallback.bind(dag) if self.fallback else None

        def cost(node: Node) -> Cost:
            if isinstance(node, Recv):
                return Cost(0.0)
            found = self.seconds.get(node.id)
            if found is None:
                found = self.seconds.get((node.id.op, node.id.PASS or ""))
            if fallback is not None:
                assumed = fallback(node)
                return assumed if found is None else Cost(found, assumed.links)
            if found is not None:
                return Cost(found)
            if isinstance(node, Compute):
                raise ConfigError(
                    f"no measured cost for {node.id}.",
                    help=f"add {(node.id.op, node.id.PASS)!r} to the table, or a fallback.",
                )
            return Cost(0.0)

        return cost


def paying(dag: Dag, nodes: Iterable[NodeId]) -> list[NodeId]:
    """Which nodes of one program share its time: its passes and updates; without any, all but what is received."""
    listed = list(nodes)
    passes = [n for n in listed if isinstance(dag.nodes[n], Compute | Update)]
    return passes or [n for n in listed if not isinstance(dag.nodes[n], Recv)]


def _program(span: Span) -> tuple[tuple[str, str | None], ...]:
    return tuple((node.op, node.PASS) for node in span.nodes)
