"""The command that compiles a plan for absent hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from piper_jax.cli.plans import job_of, planned, say, target_of
from piper_jax.config import Config, DevicesSection, planned_strategy

if TYPE_CHECKING:
    from piper_jax.planning import Plan
    from piper_jax.targets.profiles import Target
    from piper_jax.targets.report import TargetReport


def compile_for(source: Config, target: str) -> int:
    """Compiles every program of a plan for absent hardware; prints memory, FLOPs and what XLA's schedule hides."""
    console = Console()
    say(console, str(compiled_for(console, source, target_of(target))[1]))
    return 0


def compiled_for(console: Console, source: Config, target: Target) -> tuple[Plan, TargetReport]:
    """Plans and compiles for a target; CPU devices are virtual ones, as many as the plan needs."""
    from piper_jax.targets.topology import require_compiler

    require_compiler(target)
    count = target.for_devices(planned_strategy(source).num_devices).num_devices if target.family == "cpu" else None
    job = job_of(source.model_copy(update={"devices": DevicesSection(platform="cpu", num_virtual=count)}))
    made = planned(console, job)
    from piper_jax.targets.ahead import compile_ahead

    return made, compile_ahead(made, target)
