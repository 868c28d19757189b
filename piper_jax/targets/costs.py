"""Costs for the simulator from programs that were compiled for a target, where nothing can be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Send
from piper_jax.simulation import Hardware, MeasuredCosts, RooflineCosts
from piper_jax.simulation.costs.measured import paying
from piper_jax.simulation.hardware import Level, hardware_profile
from piper_jax.targets.overlap import CollectiveUse, Work
from piper_jax.targets.profiles import Target
from piper_jax.targets.report import ProgramReport, TargetReport


def compiled_costs(report: TargetReport, hardware: str | Hardware | None = None) -> MeasuredCosts:
    """What each node of a plan should take on a target, by the programs that its compiler wrote.

    A program takes what :func:`program_seconds` says, which its passes share. Transfers run no program: they take what
    the network of the profile takes between the devices of the report's map.

    Args:
      report: of :func:`piper_jax.targets.ahead.compile_ahead`; it need not have the compiler here.
      hardware: rates; by default the profile of the target's chip.

    Raises:
      ConfigError: the chip has no profile.
    """
    target, dag = report.target, report.device_map.dag
    profile = hardware_profile(target.chip.name if hardware is None else hardware)
    seconds: dict[NodeId, float] = {n: 0.0 for n, node in dag.nodes.items() if not isinstance(node, Send)}
    outside = 0.0
    for program in report.programs:
        taken = program_seconds(program, target, profile, lambda use, p=program: report.level(p, use, profile))
        for nodes in program.nodes:
            paid = paying(dag, nodes)
            seconds.update(dict.fromkeys(paid, taken / max(1, len(paid))))
            outside += 0.0 if nodes else taken
    return MeasuredCosts(
        seconds=seconds,
        fallback=RooflineCosts(hardware=profile, layout=report.device_map.layout),
        num_processors=profile.concurrency,
        outside_seconds=outside,
        origin=f"compiled {target}",
    )


def program_seconds(
    program: ProgramReport,
    target: Target,
    hardware: Hardware,
    level: Callable[[CollectiveUse], Level] | None = None,
) -> float:
    """One run of a program: its work, and of each collective what the work beside it does not cover.

    Where the compiler estimates cycles (TPU), work takes these, at the rate at which the matrix units reach their peak.
    Elsewhere each instruction takes the longer of its arithmetic and its memory traffic at peak rates, and all of them
    what XLA's count of operations takes at least; a text without instructions is taken for a single one.

    Args:
      level: of the network, that a collective crosses; by default the one between as many neighbours.
    """
    counted = bool(program.cycles and target.chip.flops_per_cycle)
    cycle_seconds = target.chip.flops_per_cycle / hardware.peak("bfloat16")

    def taken(work: Iterable[Work]) -> float:
        return sum(w.cycles * cycle_seconds if counted else w.seconds(hardware) for w in work)

    exposed = sum(
        max(0.0, use.seconds(hardware, level(use) if level else None) - taken(use.beside))
        for use in program.collectives
    )
    least = 0.0
    if not counted:
        dtype = max(program.work, key=lambda work: work.flops).dtype if program.work else "float32"
        traffic = 0.0 if program.work else program.accessed_bytes / hardware.memory_bandwidth
        least = max(program.flops / hardware.peak(dtype), traffic)
    return max(hardware.launch_seconds, max(taken(program.work), least) + exposed)
