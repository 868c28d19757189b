"""Roofline costs: the time that peak arithmetic, memory and network rates allow. A lower bound."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from piper_jax.arguments import require_fields
from piper_jax.errors import ConfigError
from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Compute, Node, Op, Recv, Send, Update
from piper_jax.simulation.costs.base import Cost, CostModel
from piper_jax.simulation.costs.network import Network
from piper_jax.simulation.hardware import Hardware, hardware_profile, require_numbers
from piper_jax.simulation.sizes import Sizes
from piper_jax.topology import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCosts(CostModel):
    """Seconds from the plan's FLOPs and bytes and a hardware profile (Williams et al. 2009).

    A pass takes the longer of its arithmetic and its memory traffic (parameters, values in and out, residuals), both
    divided by the microbatches and by the devices of the group.

    Attributes:
      hardware: a profile, or the name of one.
      efficiency: share of the peak arithmetic rate that is reached, in (0, 1].
      layout: where the logical devices are; by default on consecutive physical ones.
    """

    hardware: Hardware | str
    efficiency: float = 1.0
    layout: Layout | None = None

    def __post_init__(self) -> None:
        require_fields(self, ConfigError, "RooflineCosts: ")
        require_numbers("RooflineCosts", above=0, efficiency=self.efficiency)
        if self.efficiency > 1:
            raise ConfigError(
                f"RooflineCosts: efficiency={self.efficiency!r}.", help="give a number above 0, at most 1."
            )

    def describe(self, passes: Set[str]) -> str:
        """Such as ``"roofline h100"``."""
        reached = "" if self.efficiency == 1.0 else f" at {self.efficiency:.0%}"
        return f"roofline {hardware_profile(self.hardware).name}{reached}"

    @property
    def concurrency(self) -> float | None:
        """That of the hardware."""
        return hardware_profile(self.hardware).concurrency

    @property
    def device_bytes(self) -> int | None:
        """That of the hardware."""
        return hardware_profile(self.hardware).memory_bytes

    def bind(self, dag: Dag) -> Callable[[Node], Cost]:
        """The cost function for the nodes of ``dag``."""
        hardware = hardware_profile(self.hardware)
        sizes = Sizes(dag)
        network = Network(dag, hardware, sizes, self.layout)
        passes = _PassSeconds(dag, hardware, sizes, self.efficiency)

        def cost(node: Node) -> Cost:
            match node:
                case Compute():
                    return passes.compute(node)
                case Update():
                    return passes.update(node)
                case Send():
                    return network.transfer(node)
                case Recv():
                    return Cost(0.0)
                case _:
                    return network.collective(node)

        return cost


class _PassSeconds:
    """Costs of computations, one table entry for each op, pass and group."""

    def __init__(self, dag: Dag, hardware: Hardware, sizes: Sizes, efficiency: float):
        self._dag, self._hardware, self._sizes, self._efficiency = dag, hardware, sizes, efficiency
        self._values, self._dtypes = _values_of_passes(dag)
        self._table: dict[tuple[str, str | None, str], Cost] = {}

    def compute(self, node: Compute) -> Cost:
        group = node.group or ""
        key = (node.id.op, node.id.PASS, group)
        found = self._table.get(key)
        if found is None:
            found = self._table[key] = Cost(self._seconds(self._dag.ops[node.id.op], node.id.PASS or "F", group))
        return found

    def update(self, node: Update) -> Cost:
        """Reads parameters, gradients and optimizer state once and writes back all but the gradients."""
        if node.round:
            return Cost(self._hardware.launch_seconds)
        group, sizes = node.group or "", self._sizes
        traffic = 2 * self._dag.common_optimizer_bytes
        for bucket in (self._dag.buckets[name] for name in node.buckets):
            shard = sizes.scattered_bytes(bucket, group)
            traffic += 3 * shard + 2 * sizes.optimizer_bytes(bucket, group)
        return Cost(max(self._hardware.launch_seconds, traffic / self._hardware.memory_bandwidth))

    def _seconds(self, op: Op, PASS: str, group: str) -> float:
        hardware, sizes = self._hardware, self._sizes
        parts = self._dag.num_microbatches * sizes.num_devices(group)
        peak = hardware.peak(self._dtypes.get(op.name, "float32")) * self._efficiency
        traffic = sum(sizes.value_bytes(name, group) for name in self._values.get((op.name, PASS), ()))
        buckets = (self._dag.buckets[name] for name in op.reads if name in self._dag.buckets)
        traffic += sum(sizes.bucket_bytes(bucket, group) for bucket in buckets if not bucket.unread)
        arithmetic = pass_flops(op, PASS) / parts / peak
        return max(hardware.launch_seconds, arithmetic, traffic / hardware.memory_bandwidth)


def pass_flops(op: Op, PASS: str) -> int:
    """Floating-point operations of one pass over the whole batch."""
    match PASS:
        case "F":
            return op.flops_forward
        case "BI":
            return op.flops_backward_input
        case "BW":
            return op.flops_backward_weight
        case _:
            return op.flops_backward_input + op.flops_backward_weight


def _values_of_passes(dag: Dag) -> tuple[dict[tuple[str, str | None], dict[str, None]], dict[str, str]]:
    """Values that enter or leave each pass of each op (for one microbatch), and the floating dtype of each op."""
    values: dict[tuple[str, str | None], dict[str, None]] = {}
    dtypes: dict[str, str] = {}
    for edge in dag.data:
        if edge.src.MB:
            continue
        for end in (edge.src, edge.dst):
            if end.op in dag.ops:
                values.setdefault((end.op, end.PASS), {}).update(dict.fromkeys(edge.values))
        for name in edge.values:
            dtype = dag.values[name].dtype if name in dag.values else ""
            if "float" in dtype and edge.src.op in dag.ops:
                dtypes.setdefault(edge.src.op, dtype)
    return values, dtypes
