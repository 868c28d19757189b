"""What the commands do, given a checked configuration."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from piper_jax.cli.boundary import EXIT_FAULT
from piper_jax.cli.devices import prepare_devices
from piper_jax.cli.joining import joined
from piper_jax.cli.selection import parsed_filter
from piper_jax.config import Config, DevicesSection, config_text, planned_strategy
from piper_jax.errors import ConfigError, counted
from piper_jax.recording import Recorder, RunFolder
from piper_jax.train.stopping import Stopped, StopSignal
from piper_jax.versions import require_versions

if TYPE_CHECKING:
    from piper_jax.data import Batch
    from piper_jax.planning import Plan
    from piper_jax.simulation import Report
    from piper_jax.targets.profiles import Target
    from piper_jax.targets.report import TargetReport
    from piper_jax.train.comparison import Comparison
    from piper_jax.train.job import Job

MAX_LEAVES = 10
Source = Config | Path


def train(config: Config) -> int:
    """Trains, from the newest checkpoint of the run on: prints the plan, progress, held-out loss and unigram entropy.

    A signal ends it in order: it saves, and the same command goes on.
    """
    console, folder = joined(config), RunFolder.of(config).make()
    with nullcontext() if console.quiet else folder.locked(), StopSignal() as stop:
        try:
            return _train(console, config, folder, stop)
        except Stopped:
            name = stop.requested.name if stop.requested is not None else "by another process"
            _print(console, f"stopped  {name}; the same command goes on")
            return 0


def _train(console: Console, config: Config, folder: RunFolder, stop: StopSignal) -> int:
    with stop.interruptible():
        for fault in require_versions():
            _print(console, f"warning: {fault.what} {fault.help}")
        job = _job(config)
        from piper_jax.data import open_data
        from piper_jax.train.loop import run_job
        from piper_jax.train.progress import progress_display
        from piper_jax.train.resuming import checkpointer, last_saved

        saved = last_saved(config, checkpointer(config, folder))
        step = 0 if saved is None else saved.step
        for error in saved.passed_over if saved is not None else ():
            _print(console, f"passed over  {error.what}")
        if step >= config.train.steps:
            _print(console, f"finished  {folder.path} has all {step} steps; folder=runs/mine begins another run")
            return 0
        data = open_data(config, folder.path)
        _print(console, f"run    {folder.path}\ndata   {data}")
        plan = _planned(console, job)
        simulated = _simulated(plan, config)
        _print(console, _grid(simulated) + "\n")
        if (placed := job.device_map(plan)).crossings:
            _print(console, f"{placed}\n")
        if saved is not None:
            _print(console, f"resumed  from step {step}: {folder.checkpoints}")
        writes = not console.quiet
        if writes:
            folder.save(config)
    with (
        Recorder.open(config, folder, after=step) if writes else Recorder() as recorder,
        progress_display(console, num_steps=config.train.steps, log_every=config.train.log_every) as display,
    ):
        if saved is None:
            recorder.record(0, {"bubble_simulated": simulated.bubble, "peak_bytes_simulated": simulated.peak_bytes})
        summary = run_job(job, plan, data, display, folder, recorder, stop, saved)
    _print(console, f"\n{summary}")
    if data.corpus.skipped.reasons:
        _print(console, f"data             {data.corpus.skipped}")
    return 0


def plan(config: Config, target: str | None = None) -> int:
    """Plans; prints stages, directives, groups and the grid, and where the groups would lie on a target."""
    chosen = None if target is None else _target(target)
    console, job = Console(), _job(config)
    made = _planned(console, job)
    _print(console, f"{made}\n\n{_grid(_simulated(made, config))}")
    if chosen is not None:
        from piper_jax.targets.mapping import map_onto

        _print(console, f"\n{map_onto(made, chosen)}")
    return 0


def simulate(source: Source, hardware: str | None, costs: str | None, target: str | None, output: Path | None) -> int:
    """Simulates a plan and prints the report; draws it where ``output`` says so.

    Args:
      costs: ``measured`` compiles and times the plan on this machine's devices, and prints the real step as well;
        ``compiled`` compiles it for ``target``.
      target: where the plan is to lie; without ``hardware``, its chip is the hardware.
    """
    chosen, console = None if target is None else _target(target), Console()
    match costs:
        case "measured":
            if chosen is not None:
                raise ConfigError(
                    f"--target {target}: measured costs are those of this machine.", help="use --costs compiled."
                )
            report = _measured_report(console, source, hardware)
        case "compiled":
            report = _compiled_report(console, source, hardware, chosen or _target("cpu"))
        case _:
            report = _report(_loaded(console, source), source, hardware, costs, chosen)
            _print(console, str(report))
    if output is not None:
        from piper_jax.visualization import draw

        _print(console, f"wrote {draw(report, output)}")
    return 0


def show(source: Source, select: str | None, output: Path | None) -> int:
    """Prints the grid of a plan, or its nodes that a filter selects; draws the timeline or the graph to ``output``."""
    from piper_jax.visualization import draw, grid_text

    console = Console()
    chosen = None if select is None else parsed_filter(select)
    made = _loaded(console, source)
    report = _report(made, source, None, None, None)
    if output is not None:
        _print(console, f"wrote {draw(made, output, select=chosen) if chosen else draw(report, output)}")
    elif chosen is not None:
        from piper_jax.ir.text import selection_text

        _print(console, selection_text(made.complete(), chosen))
    else:
        _print(console, grid_text(report))
    return 0


def compile_for(source: Config, target: str) -> int:
    """Compiles every program of a plan for absent hardware; prints memory, FLOPs and what XLA's schedule hides."""
    console = Console()
    _print(console, str(_compiled(console, source, _target(target))[1]))
    return 0


def doctor(folder: Path) -> int:
    """Prints versions, devices and disk space, and what is missing; 1 where nothing can run like this."""
    from piper_jax.cli.diagnosis import diagnose

    console, broken = Console(), False
    for finding in diagnose(folder):
        _print(console, str(finding))
        broken |= finding.is_broken
    return EXIT_FAULT if broken else 0


def check(config: Config, *, bisect: bool = False, node: str | None = None) -> int:
    """Plans and compares one step with one device; the exit code is 1 where they differ.

    Args:
      bisect: compare every value between stages instead, and name the first node that differs.
      node: the name of a node to run alone instead; prints what it reads and gives.
    """
    if bisect and node is not None:
        raise ConfigError("check --bisect --node: two questions.", help="ask one, then the other.")
    console = joined(config)
    job = _job(config)
    from piper_jax.data import open_data
    from piper_jax.train.comparison import compare_with_one_device

    made, batch = _planned(console, job), next(open_data(config).training())
    if bisect:
        return _bisect(console, job, made, batch)
    if node is not None:
        return _node(console, job, made, batch, node)
    comparison = compare_with_one_device(job, made, batch)
    console.print(_comparison_table(comparison))
    exceeding, total = len(comparison.exceeding), len(comparison.differences)
    if exceeding:
        _print(console, f"{exceeding} of {total} differ from one device by more than {comparison.tolerance:g}.")
        return EXIT_FAULT
    _print(console, f"all {total} equal one device to {comparison.tolerance:g} ({comparison.precision}).")
    return 0


def show_config(config: Config) -> int:
    """Prints the resolved configuration."""
    print(config_text(config), end="")
    return 0


def _bisect(console: Console, job: Job, made: Plan, batch: Batch) -> int:
    import piper_jax as piper
    from piper_jax.train.comparison import TOLERANCES, precision_of

    runnable = piper.compile(made, devices=job.device_map(made))
    state = runnable.init(job.parameters(), job.config.train.seed)
    tolerance = TOLERANCES[precision_of(made)]
    first = runnable.bisect(state, batch, rtol=tolerance)
    _print(console, f"first difference  {first}" if first else f"no node differs by more than {tolerance:g}.")
    return EXIT_FAULT if first else 0


def _node(console: Console, job: Job, made: Plan, batch: Batch, name: str) -> int:
    import piper_jax as piper
    from piper_jax.ir.node_names import node_named
    from piper_jax.train.comparison import TOLERANCES, precision_of

    node, tolerance = node_named(made.complete(), name), TOLERANCES[precision_of(made)]
    runnable = piper.compile(made, devices=job.device_map(made))
    found = runnable.run_node(node, runnable.init(job.parameters(), job.config.train.seed), batch)
    differs = not found.difference <= tolerance
    said = f"differs from one device by more than {tolerance:g}" if differs else f"equals one device to {tolerance:g}"
    _print(console, f"{found}\n{found.node} {said}.")
    return EXIT_FAULT if differs else 0


# -- parts ------------------------------------------------------------------------------------------
def _job(config: Config) -> Job:
    prepare_devices(config.devices)
    from piper_jax.train.job import Job

    return Job.of(config)


def _planned(console: Console, job: Job) -> Plan:
    started = time.perf_counter()
    made = job.plan().check()
    groups, nodes = counted(len(made.groups), "device group"), counted(len(made.complete().nodes), "node")
    counts = f"{groups}, {counted(job.strategy.num_devices, 'device')}, {nodes}"
    _print(console, f"plan   {job.strategy}: {counts}, made and checked in {time.perf_counter() - started:.1f} s")
    return made


def _loaded(console: Console, source: Source) -> Plan:
    """A saved plan, or that of a configuration."""
    if isinstance(source, Path):
        from piper_jax.planning import load_plan

        return load_plan(source)
    return _planned(console, _job(source))


def _report(made: Plan, source: Source, hardware: str | None, costs: str | None, target: Target | None) -> Report:
    from piper_jax.simulation import simulate as run

    title = source.stem if isinstance(source, Path) else _title(source)
    if target is None:
        return run(made, hardware=hardware, costs=costs, title=title)
    from piper_jax.targets.mapping import map_onto

    placed = map_onto(made, target)
    return run(made, hardware=hardware or target.chip.name, costs=costs, devices=placed, title=title)


def _target(text: str) -> Target:
    from piper_jax.targets.profiles import parse_target

    return parse_target(text)


def _compiled(console: Console, source: Config, target: Target) -> tuple[Plan, TargetReport]:
    """Plans and compiles for a target; CPU devices are virtual ones, as many as the plan needs."""
    from piper_jax.targets.topology import require_compiler

    require_compiler(target)
    count = target.for_devices(planned_strategy(source).num_devices).num_devices if target.family == "cpu" else None
    job = _job(source.model_copy(update={"devices": DevicesSection(platform="cpu", num_virtual=count)}))
    made = _planned(console, job)
    from piper_jax.targets.ahead import compile_ahead

    return made, compile_ahead(made, target)


def _compiled_report(console: Console, source: Source, hardware: str | None, target: Target) -> Report:
    """Prints and returns the report with costs from the programs that a compiler wrote for a target."""
    if isinstance(source, Path):
        raise ConfigError("a saved plan has no programs to compile.", help="give the configuration that it is of.")
    made, compiled = _compiled(console, source, target)
    from piper_jax.ir.columns import bytes_text
    from piper_jax.simulation import simulate as run
    from piper_jax.targets.costs import compiled_costs

    report = run(made, costs=compiled_costs(compiled, hardware), title=_title(source))
    largest = max(compiled.programs, key=lambda program: program.temporary_bytes)
    _print(
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
    job = _job(source)
    made = _planned(console, job)
    from piper_jax.simulation import simulate as run
    from piper_jax.train.measuring import measure_job

    found = measure_job(job, made)
    report = run(made, costs=found.costs, title=_title(source))
    _print(console, f"{report}\n\n{found.beside(report)}")
    return report


def _title(config: Config) -> str:
    return " + ".join(directive.name for directive in config.strategy.directives) or "1F1B"


def _simulated(plan: Plan, config: Config) -> Report:
    from piper_jax.simulation import simulate as run

    return run(plan, title=_title(config))


def _grid(report: Report) -> str:
    from piper_jax.visualization import grid_text

    return grid_text(report)


def _comparison_table(comparison: Comparison) -> Table:
    """The loss, and the leaves that differ most."""
    table = Table("", box=None, pad_edge=False)
    for heading in ("largest value", "difference"):
        table.add_column(heading, justify="right")
    loss, *_ = comparison.differences
    leaves = [leaf for leaf in comparison.worst if leaf is not loss]
    for leaf in (loss, *leaves[:MAX_LEAVES]):
        style = "red" if leaf in comparison.exceeding else ""
        table.add_row(leaf.name, f"{leaf.scale:.3e}", f"{leaf.relative:.1e}", style=style)
    if len(leaves) > MAX_LEAVES:
        table.add_row(f"... and {counted(len(leaves) - MAX_LEAVES, 'more leaf')}", "", "smaller")
    return table


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
