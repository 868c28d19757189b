"""Compiles every program of a plan for hardware that is not there. Nothing is executed and nothing is placed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from piper_jax.errors import ConfigError, PlanError
from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Collective
from piper_jax.lowering.context import context
from piper_jax.lowering.executable import lower
from piper_jax.lowering.instruction import Instruction
from piper_jax.lowering.programs import Compiler
from piper_jax.planning import Plan, Unbound
from piper_jax.targets.overlap import collective_uses
from piper_jax.targets.profiles import Target, parse_target
from piper_jax.targets.report import ProgramReport, TargetReport
from piper_jax.targets.scheduled_hlo import Module
from piper_jax.targets.topology import topology_devices


def compile_ahead(plan: Plan, target: str | Target, *, options: dict[str, bool | str] | None = None) -> TargetReport:
    """Compiles one training step of a plan for a target, each distinct program once, and reads XLA's schedule.

    Args:
      plan: traced, placed and ordered; it is completed and checked here.
      target: such as ``"gpu:h100:1x8"`` or ``"tpu:v5p:2x2x2"``; it may have more devices than the plan needs.
      options: of the compiler, besides those of the target.

    Raises:
      ConfigError: an unknown target, its compiler is not installed, or it has too few devices.
      PlanError: a rule is broken, or a program does not compile for this target.
    """
    found = parse_target(target) if isinstance(target, str) else target
    if isinstance(plan.source, Unbound):
        raise PlanError(
            "compile: this plan has no traced program.", help="plan.bind(loss_fn, params, batch, optimizer=tx)"
        )
    needed = 1 + max(d for group in plan.check().groups.values() for d in group.devices)
    if needed > found.num_devices:
        raise ConfigError(
            f"target {found} has {found.num_devices} devices; the plan needs {needed}.",
            help="name a larger target, or lower data_parallel or pipeline_parallel.",
        )
    devices, begin = topology_devices(found), time.perf_counter()
    chosen = {**found.options, **(options or {})}
    dag = plan.complete()
    step = context(dag, plan.source, devices, plan.source.batch.size, training=True)
    instructions = lower(step, Compiler(options=chosen, runs=False)).instructions()
    programs = tuple(_program(found, dag, same) for same in _distinct(instructions))
    return TargetReport(
        target=found, num_devices=needed, options=chosen, programs=programs,
        num_transfers=sum(i.role == "transfer" for i in instructions), seconds=time.perf_counter() - begin,
    )  # fmt: skip


def _distinct(instructions: Iterable[Instruction]) -> list[list[Instruction]]:
    """Instructions by the program that they run."""
    found: dict[str, list[Instruction]] = {}
    for instruction in instructions:
        if instruction.program is not None:
            found.setdefault(instruction.program.digest, []).append(instruction)
    return list(found.values())


def _program(target: Target, dag: Dag, same: list[Instruction]) -> ProgramReport:
    first = same[0]
    assert first.program is not None
    try:
        executable = first.program.executable
    except Exception as error:
        slices = "on TPU a device group must be a slice that exists, such as whole hosts."
        raise PlanError(
            f"target {target}: program {first.label!r} does not compile.",
            detail=str(error).splitlines()[:6],
            help=slices if target.family == "tpu" else "",
        ) from error
    module, memory = Module.parse(executable.as_text()), executable.memory_analysis()
    groups = dict.fromkeys(k.group for i in same for k in (*i.reads, *i.writes))
    return ProgramReport(
        label=first.label, role=first.role, groups=tuple(groups), num_runs=len(same),
        argument_bytes=_bytes(memory, "argument"), output_bytes=_bytes(memory, "output"),
        alias_bytes=_bytes(memory, "alias"), temporary_bytes=_bytes(memory, "temp"),
        flops=_flops(executable, module), collectives=collective_uses(module),
        is_alone=all(isinstance(dag.nodes[n], Collective) for i in same for n in i.nodes),
    )  # fmt: skip


def _bytes(memory: Any, kind: str) -> int:
    return int(getattr(memory, f"{kind}_size_in_bytes", 0))


def _flops(executable: Any, module: Module) -> float:
    """What XLA counts; where it counts nothing for absent devices, the matrix products of its text."""
    costs = executable.cost_analysis() or {}
    return float(costs.get("flops", 0.0)) or float(sum(product.flops for product in module.products_of(module.entry)))
