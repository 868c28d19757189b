"""What the small commands do, given a checked configuration."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from piper_jax.cli.boundary import EXIT_FAULT
from piper_jax.cli.plans import grid, job_of, planned, report_of, say, target_of
from piper_jax.config import Config, config_text


def plan(config: Config, target: str | None = None) -> int:
    """Plans; prints stages, directives, groups and the grid, and where the groups would lie on a target."""
    chosen = None if target is None else target_of(target)
    console, job = Console(), job_of(config)
    made = planned(console, job)
    say(console, f"{made}\n\n{grid(report_of(made, config))}")
    if chosen is not None:
        from piper_jax.targets.mapping import map_onto

        say(console, f"\n{map_onto(made, chosen)}")
    return 0


def doctor(folder: Path) -> int:
    """Prints versions, devices and disk space, and what is missing; 1 where nothing can run like this."""
    from piper_jax.cli.diagnosis import diagnose

    console, broken = Console(), False
    for finding in diagnose(folder):
        say(console, str(finding))
        broken |= finding.is_broken
    return EXIT_FAULT if broken else 0


def show_config(config: Config) -> int:
    """Prints the resolved configuration."""
    print(config_text(config), end="")
    return 0
