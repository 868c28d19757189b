"""The public entry: one training step on an abstract clock or on a kind of hardware."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

from piper_jax.errors import ConfigError, suggest
from piper_jax.ir.dag import Dag
from piper_jax.ir.ids import NodeId
from piper_jax.ir.linear import linearize
from piper_jax.ir.nodes import Compute
from piper_jax.planning.completion import complete
from piper_jax.simulation.costs.base import CostModel
from piper_jax.simulation.costs.measured import CostKey, MeasuredCosts
from piper_jax.simulation.costs.roofline import RooflineCosts
from piper_jax.simulation.costs.unit import UnitCosts
from piper_jax.simulation.engine import Times, run_program
from piper_jax.simulation.hardware import Hardware
from piper_jax.simulation.memory import memory_of_groups
from piper_jax.simulation.program import Program, program_of
from piper_jax.simulation.recording import Recorder, busy_times, compute_intervals, covered_times
from piper_jax.simulation.report import GroupReport, Report
from piper_jax.simulation.topology import compute_groups


class Completable(Protocol):
    """A plan: something that derives its communication when asked."""

    def complete(self) -> Dag:
        """The completed DAG."""
        ...


def simulate(
    plan: Completable | Dag,
    *,
    hardware: str | Hardware | None = None,
    costs: str | CostModel | Mapping[CostKey, float] | None = None,
    title: str = "",
) -> Report:
    """Runs one training step of a plan on a clock, without any device.

    Args:
      plan: a placed plan, or its Dag.
      hardware: a profile or its name (``"h100"``): costs are then those of a roofline.
      costs: ``"unit"`` (F=1, B=2, BI=1, BW=1, communication 0; the default without hardware), ``"roofline"``, any cost
        model, or a table of measured seconds by node or by ``(op, PASS)``.
      title: heading of the report, such as the name of the schedule.

    Returns:
      Makespan, bubble, timeline, critical path and memory; equal inputs give equal reports.

    Raises:
      ConfigError: unknown hardware or costs, or a measured table without an entry.
      PlanError: the order deadlocks; names the cycle.
    """
    model = _cost_model(costs, hardware)
    dag = complete(plan) if isinstance(plan, Dag) else plan.complete()
    program = program_of(dag, linearize(dag))
    cost = model.bind(dag)
    times = run_program(program, [cost(node) for node in program.nodes], model.concurrency)
    return _report(dag, program, times, model, title)


def _cost_model(costs: str | CostModel | Mapping[CostKey, float] | None, hardware: str | Hardware | None) -> CostModel:
    roofline = RooflineCosts(hardware=hardware) if hardware is not None else None
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
        case str():
            raise ConfigError(f"costs {costs!r} are unknown.", help=suggest(costs, ("unit", "roofline")))
        case _:
            return MeasuredCosts(seconds=costs, fallback=roofline)


def _report(dag: Dag, program: Program, times: Times, model: CostModel, title: str) -> Report:
    recorder = Recorder(dag, program, times)
    spans = recorder.spans()
    makespan = max(times.slot_end, default=0.0)
    groups = _group_reports(dag, program, times, makespan, busy_times(program, times, spans))
    idle = sum(group.bubble * len(group.devices) for group in groups)
    return Report(
        title=title,
        costs=model.describe({node.id.PASS or "" for node in program.nodes if isinstance(node, Compute)}),
        time_unit=model.time_unit,
        num_stages=len({op.PP for op in dag.ops.values() if op.PP is not None}),
        num_microbatches=dag.num_microbatches,
        makespan=makespan,
        bubble=idle / max(1, sum(len(group.devices) for group in groups)),
        groups=groups,
        timeline=tuple(spans),
        critical_path=tuple(recorder.critical_path()),
        sources={op.name: "  ".join(filter(None, (op.path, op.source))) for op in dag.ops.values()},
    )


def _group_reports(
    dag: Dag, program: Program, times: Times, makespan: float, busy: Mapping[str, Mapping[str, float]]
) -> tuple[GroupReport, ...]:
    def interval(node_id: NodeId) -> tuple[float, float]:
        number = index[node_id]
        slot = program.node_slot[number]
        single = len(program.slots[slot]) == 1
        return (times.node_start[number] if single else times.slot_start[slot]), times.slot_end[slot]

    index = {node.id: number for number, node in enumerate(program.nodes)}
    memory = memory_of_groups(dag, interval)
    covered = covered_times(compute_intervals(program, times))
    stages: dict[str, set[int]] = defaultdict(set)
    for node in program.nodes:
        if isinstance(node, Compute) and node.id.PP is not None:
            stages[node.group or ""].add(node.id.PP)
    return tuple(
        GroupReport(
            name=name,
            devices=dag.groups[name].devices,
            stages=tuple(sorted(stages[name])),
            bubble=1.0 - covered.get(name, 0.0) / makespan if makespan else 0.0,
            busy=busy.get(name, {}),
            memory=memory[name],
        )
        for name in compute_groups(dag)
    )
