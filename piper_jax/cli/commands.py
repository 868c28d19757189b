"""What the commands do, given a checked configuration."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from piper_jax.cli.boundary import EXIT_FAULT
from piper_jax.cli.devices import prepare_devices
from piper_jax.config import Config, config_text

if TYPE_CHECKING:
    from piper_jax.planning import Plan
    from piper_jax.train.comparison import Comparison
    from piper_jax.train.job import Job

MAX_LEAVES = 10


def train(config: Config) -> int:
    """Plans and trains; prints the grid of the plan, progress, held-out loss and unigram entropy."""
    console, job = Console(), _job(config)
    from piper_jax.train.corpus import load_corpus
    from piper_jax.train.loop import run_job
    from piper_jax.train.progress import progress_display

    corpus = load_corpus(config.data, min_part_bytes=config.train.sequence_length + 2)
    _print(console, f"data   {corpus}")
    plan = _planned(console, job)
    _print(console, _grid(plan, config) + "\n")
    with progress_display(console, num_steps=config.train.steps, log_every=config.train.log_every) as display:
        summary = run_job(job, plan, corpus, display)
    _print(console, f"\n{summary}")
    return 0


def plan(config: Config) -> int:
    """Plans; prints stages, directives, groups and the grid."""
    console, job = Console(), _job(config)
    made = _planned(console, job)
    _print(console, f"{made}\n\n{_grid(made, config)}")
    return 0


def check(config: Config) -> int:
    """Plans and compares one step with one device; the exit code is 1 where they differ."""
    console, job = Console(), _job(config)
    from piper_jax.train.batches import RandomWindows
    from piper_jax.train.comparison import compare_with_one_device
    from piper_jax.train.corpus import load_corpus

    sizes = config.train
    corpus = load_corpus(config.data, min_part_bytes=sizes.sequence_length + 2)
    batches = RandomWindows(
        text=corpus.train, batch_size=sizes.batch_size, sequence_length=sizes.sequence_length, seed=sizes.seed
    )
    comparison = compare_with_one_device(job, _planned(console, job), next(batches))
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


# -- parts ------------------------------------------------------------------------------------------
def _job(config: Config) -> Job:
    prepare_devices(config.devices)
    from piper_jax.train.job import Job

    return Job.of(config)


def _planned(console: Console, job: Job) -> Plan:
    started = time.perf_counter()
    made = job.plan().check()
    counts = f"{len(made.groups)} device groups, {job.strategy.num_devices} devices, {len(made.complete().nodes)} nodes"
    _print(console, f"plan   {job.strategy}: {counts}, made and checked in {time.perf_counter() - started:.1f} s")
    return made


def _grid(plan: Plan, config: Config) -> str:
    from piper_jax.simulation import simulate
    from piper_jax.visualization import grid_text

    names = [directive.name for directive in config.strategy.directives]
    return grid_text(simulate(plan, title=" + ".join(names) or "1F1B"))


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
        table.add_row(f"... and {len(leaves) - MAX_LEAVES} more leaves", "", "smaller")
    return table


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
