"""The commands that simulate a plan, with costs from a model, from measurements or from a compiler, and draw it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from piper_jax.cli.compiling import compiled_for
from piper_jax.cli.plans import Source, job_of, loaded, planned, report_of, say, target_of, title_of
from piper_jax.cli.selection import parsed_filter
from piper_jax.errors import ConfigError

if TYPE_CHECKING:
    from piper_jax.simulation import Report
    from piper_jax.targets.profiles import Target


def simulate(source: Source, hardware: str | None, costs: str | None, target: str | None, output: Path | None) -> int:
    """Simulates a plan and prints the report; draws it where ``output`` says so.

    Args:
      costs: ``measured`` compiles and times the plan on this machine's devices, and prints the real step as well;
        ``compiled`` compiles it for ``target``.
      target: where the plan is to lie; without ``hardware``, its chip is the hardware.
    """
    chosen, console = None if target is None else target_of(target), Console()
    match costs:
        case "measured":
            if chosen is not None:
                raise ConfigError(
                    f"--target {target}: measured costs are those of this machine.", help="use --costs compiled."
                )
            report = _measured_report(console, source, hardware)
        case "compiled":
            report = _compiled_report(console, source, hardware, chosen or target_of("cpu"))
        case _:
            report = report_of(loaded(console, source), source, hardware, costs, chosen)
            say(console, str(report))
    if output is not None:
        from piper_jax.visualization import draw

        say(console, f"wrote {draw(report, output)}")
    return 0


def show(source: Source, select: str | None, output: Path | None) -> int:
    """Prints the grid of a plan, or its nodes that a filter selects; draws the timeline or the graph to ``output``."""
    from piper_jax.visualization import draw, grid_text

    console = Console()
    chosen = None if select is None else parsed_filter(select)
    made = loaded(console, source)
    report = report_of(made, source)
    if output is not None:
        say(console, f"wrote {draw(made, output, select=chosen) if chosen else draw(report, output)}")
    elif chosen is not None:
        from piper_jax.ir.text import selection_text

        say(console, selection_text(made.complete(), chosen))
    else:
        say(console, grid_text(report))
    return 0


def _compiled_report(console: Console, source: Source, hardware: str | None, target: Target) -> Report:
    """Prints and returns the report with costs from the programs that a compiler wrote for a target."""
    if isinstance(source, Path):
        raise ConfigError("a saved plan has no programs to compile.", help="give the configuration that it is of.")
    made, compiled = compiled_for(console, source, target)
    from piper_jax.ir.columns import bytes_text
    from piper_jax.simulation import simulate as run
    from piper_jax.targets.costs import compiled_costs

    report = run(made, costs=compiled_costs(compiled, hardware), title=title_of(source))
    largest = max(compiled.programs, key=lambda program: program.temporary_bytes)
    say(
        console,
        f"{report}\n\ntemporaries  up to {bytes_text(largest.temporary_bytes)} ({largest.label}), uncounted above",
    )
    return report


def _measured_report(console: Console, source: Source, hardware: str | None) -> Report:
    """Prints and returns the report with costs measured here."""
    if isinstance(source, Path):
        raise ConfigError("a saved plan has no programs to measure.", help="give the configuration that it is of.")
    if hardware is not None:
        raise ConfigError(
            f"--hardware {hardware}: measured costs are those of this machine.", help="leave --hardware out."
        )
    job = job_of(source)
    made = planned(console, job)
    from piper_jax.simulation import simulate as run
    from piper_jax.train.measuring import measure_job

    found = measure_job(job, made)
    report = run(made, costs=found.costs, title=title_of(source))
    say(console, f"{report}\n\n{found.beside(report)}")
    return report
