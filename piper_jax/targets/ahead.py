"""Compiles every program of a plan for hardware that is not there. Nothing is executed and nothing is placed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from piper_jax.device_map import DeviceMap
from piper_jax.errors import ConfigError, PlanError
from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Collective
from piper_jax.lowering.executable import lower
from piper_jax.lowering.instruction import Instruction
from piper_jax.lowering.preparing import lowering_context
from piper_jax.lowering.programs import Compiler
from piper_jax.planning import Plan, Unbound
from piper_jax.targets.mapping import map_onto
from piper_jax.targets.overlap import collective_uses, work_of
from piper_jax.targets.profiles import Target, parse_target
from piper_jax.targets.report import ProgramReport, TargetReport
from piper_jax.targets.scheduled_hlo import Module
from piper_jax.targets.topology import stand_in, topology_devices
from piper_jax.topology import PhysicalDevice, Topology


def compile_ahead(
    plan: Plan,
    target: str | Target,
    *,
    options: dict[str, bool | str] | None = None,
    device_map: DeviceMap | None = None,
) -> TargetReport:
    """Compiles one training step of a plan for a target, each distinct program once, and reads XLA's schedule.

    Args:
      plan: traced, placed and ordered; it is completed and checked here.
      target: such as ``"gpu:h100:1x8"``, ``"tpu:v5p:2x2x2"`` or ``"cpu"``; it may have more devices than needed.
      options: of the compiler, besides those of the target.
      device_map: on ``target.topology``; by default the best placement.

    Raises:
      ConfigError: an unknown target, its compiler is not installed, or it has too few devices.
      PlanError: a rule is broken, a group is no slice of a TPU, or a program does not compile for this target.
    """
    found = parse_target(target) if isinstance(target, str) else target
    if isinstance(plan.source, Unbound):
        raise PlanError(
            "compile: this plan has no traced program.", help="plan.bind(loss_fn, params, batch, optimizer=tx)"
        )
    placed = map_onto(plan.check(), found) if device_map is None else device_map
    placed.require_slices()
    needed = 1 + max(d for group in placed.groups for d in group.devices)
    found = found.for_devices(needed)
    (topology, devices), begin = topology_devices(found), time.perf_counter()
    chosen = {**found.options, **(options or {})}
    dag = plan.complete()
    step = lowering_context(dag, plan.source, _at(placed, topology, devices), plan.source.batch.size, training=True)
    compiler = Compiler(options=chosen, runs=False, stand_in=stand_in(found))
    instructions = lower(step, compiler).instructions()
    programs = tuple(_program(found, dag, same) for same in _distinct(instructions))
    return TargetReport(
        target=found, device_map=placed, num_devices=needed, options=chosen, programs=programs,
        num_transfers=sum(i.role == "transfer" for i in instructions), seconds=time.perf_counter() - begin,
    )  # fmt: skip


def _at(device_map: DeviceMap, topology: Topology, devices: Sequence[Any]) -> list[Any]:
    """The target's devices in the logical order of a map, which may list the same ones in another order."""
    same: dict[PhysicalDevice, list[Any]] = {}
    for described, device in zip(topology.devices, devices, strict=True):
        same.setdefault(described, []).append(device)
    if Counter(device_map.topology.devices) != Counter(topology.devices):
        raise ConfigError(
            "compile_ahead: device_map is of other devices.", help="DeviceMap.of(plan, parse_target(target).topology)."
        )
    waiting = {described: iter(found) for described, found in same.items()}
    listed = [next(waiting[described]) for described in device_map.topology.devices]
    return [listed[k] for k in device_map.layout.physical]


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
        slices = "on TPU a set of devices that communicate must be a slice that exists, such as whole hosts."
        raise PlanError(
            f"target {target}: program {first.label!r} does not compile.",
            detail=str(error).splitlines()[:6],
            help=slices if target.family == "tpu" else "",
        ) from error
    module, memory = Module.parse(executable.as_text()), executable.memory_analysis()
    groups = dict.fromkeys(k.group for i in same for k in (*i.reads, *i.writes))
    return ProgramReport(
        label=first.label, role=first.role, groups=tuple(groups), num_runs=len(same),
        nodes=tuple(i.nodes for i in same),
        argument_bytes=_bytes(memory, "argument"), output_bytes=_bytes(memory, "output"),
        alias_bytes=_bytes(memory, "alias"), temporary_bytes=_bytes(memory, "temp"),
        flops=_flops(executable, module), accessed_bytes=_accessed_bytes(executable), work=work_of(module),
        collectives=collective_uses(module),
        is_alone=all(isinstance(dag.nodes[n], Collective) for i in same for n in i.nodes),
    )  # fmt: skip


def _bytes(memory: Any, kind: str) -> int:
    return int(getattr(memory, f"{kind}_size_in_bytes", 0))


def _accessed_bytes(executable: Any) -> float:
    """What XLA counts; 0 where it counts nothing for absent devices."""
    return float((executable.cost_analysis() or {}).get("bytes accessed", 0.0))


def _flops(executable: Any, module: Module) -> float:
    """What XLA counts; where it counts nothing for absent devices, the matrix products of its text."""
    costs = executable.cost_analysis() or {}
    return float(costs.get("flops", 0.0)) or float(sum(product.flops for product in module.products_of(module.entry)))
