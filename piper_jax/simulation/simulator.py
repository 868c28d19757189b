"""The public entry: one training step on an abstract clock or on a kind of hardware."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from piper_jax.arguments import checked
from piper_jax.errors import ConfigError, suggest
from piper_jax.ir.collector import collector_paused
from piper_jax.ir.dag import Dag
from piper_jax.ir.ids import NodeId
from piper_jax.ir.linear import linearize
from piper_jax.ir.nodes import Compute
from piper_jax.planning.completion import complete
from piper_jax.planning.plan import Plan
from piper_jax.simulation.assembly import Findings, Heading, assemble
from piper_jax.simulation.costs.answers import costs_of
from piper_jax.simulation.costs.base import CostModel
from piper_jax.simulation.costs.measured import CostKey, MeasuredCosts
from piper_jax.simulation.costs.roofline import RooflineCosts
from piper_jax.simulation.costs.unit import UnitCosts
from piper_jax.simulation.engine import Times, run_program
from piper_jax.simulation.hardware import Hardware
from piper_jax.simulation.memory import memory_of_groups
from piper_jax.simulation.program import Program, program_of
from piper_jax.simulation.recording import Recorder, busy_times, compute_intervals
from piper_jax.simulation.report import Report
from piper_jax.topology import Layout


@runtime_checkable
class Laid(Protocol):
    """A device map: it knows where logical devices are."""

    @property
    def layout(self) -> Layout:
        """Logical devices on physical ones."""
        ...


@checked(ConfigError)
def simulate(
    plan: Plan | Dag,
    *,
    hardware: str | Hardware | None = None,
    costs: str | CostModel | Mapping[CostKey, float] | None = None,
    devices: Laid | None = None,
    title: str = "",
) -> Report:
    """Runs one training step of a plan on a clock, without any device.

    Args:
      plan: a placed plan, or its Dag.
      hardware: a profile or its name (``"h100"``): costs are then those of a roofline.
      costs: ``"unit"`` (F=1, B=2, BI=1, BW=1, communication 0; the default without hardware), ``"roofline"``, any cost
        model, or a table of measured seconds by node or by ``(op, PASS)``.
      devices: where the logical devices are (:class:`piper_jax.DeviceMap`), for the costs of ``hardware``; by default
        on consecutive physical ones.
      title: heading of the report, such as the name of the schedule.

    Returns:
      Makespan, bubble, timeline, critical path and memory; equal inputs give equal reports.

    Raises:
      ConfigError: unknown hardware or costs, both where one is meant, a measured table without an entry, or a cost
        that is no finite number from 0.
      PlanError: the plan is not finished, or breaks a rule of the checker (a Dag is taken as it is), or its order
        deadlocks; names the cycle.
    """
    model = _cost_model(costs, hardware, devices)
    if isinstance(plan, Plan):
        plan.require_sound()
    dag = complete(plan) if isinstance(plan, Dag) else plan.complete()
    with collector_paused():
        program = program_of(dag, linearize(dag))
        times = run_program(program, costs_of(model, dag, program.nodes), model.concurrency)
        found = _findings(dag, program, times)
    passes = {node.id.PASS or "" for node in program.nodes if isinstance(node, Compute)}
    heading = Heading(
        title=title, costs=model.describe(passes), time_unit=model.time_unit, device_bytes=model.device_bytes
    )
    return assemble(dag, found, heading)


def _cost_model(
    costs: str | CostModel | Mapping[CostKey, float] | None, hardware: str | Hardware | None, devices: Laid | None
) -> CostModel:
    if devices is not None and hardware is None:
        raise ConfigError("simulate: devices lie on hardware.", help="simulate(plan, hardware='h100', devices=...).")
    layout = devices.layout if devices is not None else None
    roofline = RooflineCosts(hardware=hardware, layout=layout) if hardware is not None else None
    if roofline is not None and (costs == "unit" or isinstance(costs, CostModel)):
        raise ConfigError(
            f"costs {costs if isinstance(costs, str) else type(costs).__name__} have no use for hardware "
            f"{getattr(hardware, 'name', hardware)}.",
            help="leave one of them out.",
        )
    match costs:
        case None:
            return roofline or UnitCosts()
        case CostModel():
            return costs
        case "unit":
            return UnitCosts()
        case "roofline":
            if roofline is None:
                raise ConfigError("roofline costs need a hardware profile.", help="simulate(plan, hardware='h100').")
            return roofline
        case "measured":
            raise ConfigError(
                "measured costs are those of a compiled plan.",
                help="simulate(train.plan, costs=train.measure_costs(state, batch)).",
            )
        case "compiled":
            raise ConfigError(
                "compiled costs are those of a plan compiled for a target.",
                help="simulate(plan, costs=compiled_costs(compile_ahead(plan, 'gpu:h100:1x8'))), of piper_jax.targets.",
            )
        case str():
            known = ("unit", "roofline", "measured", "compiled")
            raise ConfigError(f"costs {costs!r} are unknown.", help=suggest(costs, known))
        case _:
            return MeasuredCosts(seconds=costs, fallback=roofline)


def _findings(dag: Dag, program: Program, times: Times) -> Findings:
    def interval(node_id: NodeId) -> tuple[float, float]:
        number = index[node_id]
        slot = program.node_slot[number]
        single = len(program.slots[slot]) == 1
        return (times.node_start[number] if single else times.slot_start[slot]), times.slot_end[slot]

    index = {node.id: number for number, node in enumerate(program.nodes)}
    recorder = Recorder(dag, program, times)
    spans = recorder.spans()
    return Findings(
        spans=spans,
        makespan=max(times.slot_end, default=0.0),
        intervals=compute_intervals(program, times),
        busy=busy_times(program, times, spans),
        memory=memory_of_groups(dag, interval),
        critical_path=recorder.critical_path(),
    )
