"""The command that compares a planned step, its nodes or one of them with one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from piper_jax.cli.boundary import EXIT_FAULT
from piper_jax.cli.joining import joined
from piper_jax.cli.plans import job_of, planned, say
from piper_jax.config import Config
from piper_jax.errors import ConfigError, counted

if TYPE_CHECKING:
    from piper_jax.data import Batch
    from piper_jax.planning import Plan
    from piper_jax.train.comparison import Comparison
    from piper_jax.train.job import Job


MAX_LEAVES = 10


def check(config: Config, *, bisect: bool = False, node: str | None = None) -> int:
    """Plans and compares one step with one device; the exit code is 1 where they differ.

    Args:
      bisect: compare every value between stages instead, and name the first node that differs.
      node: the name of a node to run alone instead; prints what it reads and gives.
    """
    if bisect and node is not None:
        raise ConfigError("check --bisect --node: two questions.", help="ask one, then the other.")
    console = joined(config)
    job = job_of(config)
    from piper_jax.data import open_data
    from piper_jax.train.comparison import compare_with_one_device

    made, batch = planned(console, job), next(open_data(config).training())
    if bisect:
        return _bisect(console, job, made, batch)
    if node is not None:
        return _node(console, job, made, batch, node)
    comparison = compare_with_one_device(job, made, batch)
    console.print(_comparison_table(comparison))
    exceeding, total = len(comparison.exceeding), len(comparison.differences)
    if exceeding:
        say(console, f"{exceeding} of {total} differ from one device by more than {comparison.tolerance:g}.")
        return EXIT_FAULT
    say(console, f"all {total} equal one device to {comparison.tolerance:g} ({comparison.precision}).")
    return 0


def _bisect(console: Console, job: Job, made: Plan, batch: Batch) -> int:
    import piper_jax as piper
    from piper_jax.train.comparison import TOLERANCES, precision_of

    runnable = piper.compile(made, devices=job.device_map(made))
    state = runnable.init(job.parameters(), job.config.train.seed)
    tolerance = TOLERANCES[precision_of(made)]
    first = runnable.bisect(state, batch, rtol=tolerance)
    say(console, f"first difference  {first}" if first else f"no node differs by more than {tolerance:g}.")
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
    say(console, f"{found}\n{found.node} {said}.")
    return EXIT_FAULT if differs else 0


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
