"""A configuration, or a saved plan, as what commands print: a checked plan, its simulation, its grid."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from piper_jax.cli.devices import prepare_devices
from piper_jax.config import Config
from piper_jax.errors import counted

if TYPE_CHECKING:
    from piper_jax.planning import Plan
    from piper_jax.simulation import Report
    from piper_jax.targets.profiles import Target
    from piper_jax.train.job import Job

Source = Config | Path


def job_of(config: Config) -> Job:
    """The job of a configuration, once its devices are there."""
    prepare_devices(config.devices)
    from piper_jax.train.job import Job

    return Job.of(config)


def planned(console: Console, job: Job) -> Plan:
    """Its checked plan; prints what it is and how long that took."""
    started = time.perf_counter()
    made = job.plan().check()
    groups, nodes = counted(len(made.groups), "device group"), counted(len(made.complete().nodes), "node")
    counts = f"{groups}, {counted(job.strategy.num_devices, 'device')}, {nodes}"
    say(console, f"plan   {job.strategy}: {counts}, made and checked in {time.perf_counter() - started:.1f} s")
    return made


def loaded(console: Console, source: Source) -> Plan:
    """A saved plan, or that of a configuration."""
    if isinstance(source, Path):
        from piper_jax.planning import load_plan

        return load_plan(source)
    return planned(console, job_of(source))


def report_of(
    made: Plan, source: Source, hardware: str | None = None, costs: str | None = None, target: Target | None = None
) -> Report:
    """What the simulator says of a plan, by a model of costs, where it lies on ``target`` if there is one."""
    from piper_jax.simulation import simulate as run

    title = title_of(source)
    if target is None:
        return run(made, hardware=hardware, costs=costs, title=title)
    from piper_jax.targets.mapping import map_onto

    placed = map_onto(made, target)
    return run(made, hardware=hardware or target.chip.name, costs=costs, devices=placed, title=title)


def grid(report: Report) -> str:
    """Its timetable as text."""
    from piper_jax.visualization import grid_text

    return grid_text(report)


def title_of(source: Source) -> str:
    """The name of a saved plan's file, or those of a configuration's directives."""
    if isinstance(source, Path):
        return source.stem
    return " + ".join(directive.name for directive in source.strategy.directives) or "1F1B"


def target_of(text: str) -> Target:
    """The hardware that a text such as ``gpu:h100:1x8`` names."""
    from piper_jax.targets.profiles import parse_target

    return parse_target(text)


def say(console: Console, text: str) -> None:
    """Prints plain text."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
