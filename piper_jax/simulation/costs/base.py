"""What a cost model answers: how long one node takes, and which links it holds meanwhile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from typing import NamedTuple

from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Node


class Link(NamedTuple):
    """One direction of a group's connection to one level of the network. A link serves one node at a time."""

    group: str
    level: str
    direction: str


class Cost(NamedTuple):
    """Duration of a node in the model's unit of time, and the links that it holds for so long."""

    duration: float
    links: tuple[Link, ...] = ()


class CostModel(ABC):
    """Durations of the nodes of a plan. One file per model.

    A Recv costs nothing by itself: it is finished when its Send has arrived.
    """

    @abstractmethod
    def describe(self, passes: Set[str]) -> str:
        """Short text for headings, such as ``"F=1 B=2"`` (of the ``passes`` that occur) or ``"roofline h100"``."""

    @property
    def time_unit(self) -> str:
        """``"s"`` for seconds, ``""`` for abstract ticks."""
        return "s"

    @property
    def concurrency(self) -> float | None:
        """How many groups compute at full speed at once; None if every group has its own processor."""
        return None

    @property
    def device_bytes(self) -> int | None:
        """Memory of one device, if the model knows the hardware."""
        return None

    @abstractmethod
    def bind(self, dag: Dag) -> Callable[[Node], Cost]:
        """The cost function for the nodes of ``dag``, a completed plan."""
