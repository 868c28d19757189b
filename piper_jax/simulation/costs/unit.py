"""Unit costs: the abstract clock in which schedules are published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass

from piper_jax.arguments import require_fields
from piper_jax.errors import ConfigError
from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Compute, Node
from piper_jax.simulation.costs.base import Cost, CostModel
from piper_jax.simulation.hardware import require_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts(CostModel):
    """A pass over one stage costs a constant; updates and communication cost nothing.

    The published bubbles (GPipe, 1F1B: Narayanan et al. 2021, section 2.2; zero bubble: Qi et al. 2024; DualPipe:
    DeepSeek-V3, table 2) are stated in such units. Where a stage is several ops (dense, experts, dense), they share its
    cost.
    """

    F: float = 1
    B: float = 2
    BI: float = 1
    BW: float = 1

    def __post_init__(self) -> None:
        require_fields(self, ConfigError, "UnitCosts: ")
        require_numbers("UnitCosts", F=self.F, B=self.B, BI=self.BI, BW=self.BW)

    def describe(self, passes: Set[str]) -> str:
        """Such as ``"F=1 B=2"``, or ``"F=1 BI=1 BW=1"`` where backward is split."""
        return " ".join(f"{name}={getattr(self, name):g}" for name in ("F", "B", "BI", "BW") if name in passes)

    @property
    def time_unit(self) -> str:
        """Ticks."""
        return ""

    def bind(self, dag: Dag) -> Callable[[Node], Cost]:
        """The cost function for the nodes of ``dag``."""
        ops_of_stage: Counter[int | None] = Counter(op.PP for op in dag.ops.values())
        backwards_of_stage: Counter[int | None] = Counter(op.PP for op in dag.ops.values() if op.has_backward)
        table: dict[tuple[int | None, str | None], Cost] = {}
        free = Cost(0.0)

        def cost(node: Node) -> Cost:
            if not isinstance(node, Compute):
                return free
            key = (node.id.PP, node.id.PASS)
            found = table.get(key)
            if found is None:
                shares = (ops_of_stage if node.id.PASS == "F" else backwards_of_stage)[node.id.PP]
                found = table[key] = Cost(getattr(self, node.id.PASS or "F") / max(1, shares))
            return found

        return cost
