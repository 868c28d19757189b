"""Commands and their arguments. JAX is imported by the command that needs it, after its devices are prepared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from piper_jax.cli import checking, commands, compiling, simulating, training
from piper_jax.cli.boundary import exit_code
from piper_jax.config import load_config
from piper_jax.errors import ConfigError
from piper_jax.processes.ending import end_in_order

app = typer.Typer(
    name="piper",
    help="Plan how a JAX training step is spread over devices, see it, check it, run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, such as configs/gpt_stdlib.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Such as train.steps=20 optimizer.learning_rate=1e-4.")
]
Directives = Annotated[
    list[Path] | None, typer.Option("--directive", metavar="FILE", help="A Python file with @piper.strategy functions.")
]
PlanOrConfig = Annotated[Path, typer.Argument(metavar="PLAN|CONFIG", help="A saved plan (.json) or a YAML file.")]
OnTarget = Annotated[
    str | None, typer.Option("--target", help="Where it is to lie: gpu:h100:2x8, tpu:v5p:2x2x2 or cpu.")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="A file to draw to: .html .svg .png .json (Perfetto) .txt.")
]


@app.command()
def train(config: ConfigPath, overrides: Overrides = None, directive: Directives = None) -> None:
    """Train a model: shows the plan, the progress and the held-out loss."""
    _run(training.train, config, overrides, directive)


@app.command()
def plan(
    config: ConfigPath, overrides: Overrides = None, directive: Directives = None, target: OnTarget = None
) -> None:
    """Print the plan of a configuration; no device is touched."""
    _run(partial(commands.plan, target=target), config, overrides, directive)


@app.command()
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    directive: Directives = None,
    bisect: Annotated[bool, typer.Option("--bisect", help="Name the first node that differs.")] = False,
    node: Annotated[str | None, typer.Option(help="Run one node alone, such as 'F[PP=1,MB=0]'.")] = None,
) -> None:
    """Compare one planned step with the same step on one device: loss and every gradient."""
    _run(partial(checking.check, bisect=bisect, node=node), config, overrides, directive)


@app.command()
def simulate(
    source: PlanOrConfig,
    overrides: Overrides = None,
    directive: Directives = None,
    hardware: Annotated[str | None, typer.Option(help="A profile: a100 p4d h100 h200 v5e v5p v6e cpu.")] = None,
    costs: Annotated[
        str | None,
        typer.Option(help="unit, roofline, measured (compiles and times it here), or compiled (for --target)."),
    ] = None,
    target: OnTarget = None,
    output: Output = None,
) -> None:
    """Simulate a plan: makespan, bubble, busy time and peak bytes of each group."""
    run = lambda found: simulating.simulate(found, hardware, costs, target, output)  # noqa: E731
    _run(run, source, overrides, directive, output, True)


@app.command()
def show(
    source: PlanOrConfig,
    overrides: Overrides = None,
    directive: Directives = None,
    select: Annotated[str | None, typer.Option(help="Nodes, such as PP=0-1,MB=(0,2),PASS=F or path=layers.3.")] = None,
    output: Output = None,
) -> None:
    """Show a plan: its grid, the nodes that a filter selects, or a picture of either."""
    _run(lambda found: simulating.show(found, select, output), source, overrides, directive, output, True)


@app.command(name="compile")
def compile_command(
    config: ConfigPath,
    target: Annotated[str, typer.Option(help="Chips and their shape: gpu:h100:1x8 or tpu:v5p:2x2x2; or cpu.")],
    overrides: Overrides = None,
    directive: Directives = None,
) -> None:
    """Compile a plan for hardware that is not there: memory, FLOPs, and which collectives XLA hides."""
    _run(lambda found: compiling.compile_for(found, target), config, overrides, directive)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="train CONFIG, or my_script.py.")],
    processes: Annotated[int, typer.Option("-n", min=1, help="How many processes.")] = 2,
    port: Annotated[int | None, typer.Option(help="Of process 0; by default a free one.")] = None,
) -> None:
    """Run a piper command or a Python script in several processes of this machine: launch -n 4 -- train CONFIG."""
    from piper_jax.processes.launching import Launcher

    given = command if command[0].endswith(".py") else ["-m", "piper_jax", *command]
    run = Launcher(command=[sys.executable, *given], count=processes, port=port).run
    raise typer.Exit(exit_code(run))


@app.command()
def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="The folder of a run, or of one step of it.")
    ],
    step: Annotated[int | None, typer.Option(help="A step; by default the newest.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Hold every leaf against its hash.")] = False,
    export: Annotated[Path | None, typer.Option(help="A .safetensors file for the parameters.")] = None,
) -> None:
    """Show what a checkpoint holds; exits with 3 where it is damaged."""
    from piper_jax.cli.inspecting import inspect_checkpoint

    raise typer.Exit(exit_code(partial(inspect_checkpoint, checkpoint, step, verify=verify, export=export)))


@app.command()
def doctor(
    folder: Annotated[Path, typer.Option(help="Where a run is to keep what it leaves behind.")] = Path("runs"),
) -> None:
    """Print versions, devices and disk space, and what is missing; exits with 1 where something is broken."""
    raise typer.Exit(exit_code(partial(commands.doctor, folder)))


@app.command()
def config(config: ConfigPath, overrides: Overrides = None, directive: Directives = None) -> None:
    """Print a configuration with every default, as YAML."""
    _run(commands.show_config, config, overrides, directive)


def _run(
    command: Callable[[Any], int],
    path: Path,
    overrides: list[str] | None,
    directives: list[Path] | None,
    output: Path | None = None,
    takes_plan: bool = False,
) -> NoReturn:
    """Loads the configuration (a saved plan stands for itself), runs the command and exits with its code."""
    given = list(overrides or [])
    if directives:
        given.append(f"strategy.files=[{', '.join(repr(str(file)) for file in directives)}]")

    def run() -> int:
        if output is not None:
            _require_writable(output, path)
        if path.suffix.lower() != ".json":
            return command(load_config(path, given))
        _require_plan_alone(path, given, takes_plan)
        return command(path)

    raise typer.Exit(exit_code(run))


def _require_plan_alone(path: Path, given: list[str], takes_plan: bool) -> None:
    if not takes_plan:
        raise ConfigError(
            f"{path}: a saved plan has no model to plan or run.",
            help="give the YAML file that it is of; piper show and piper simulate take saved plans.",
        )
    if given:
        raise ConfigError(
            f"{path}: {given[0]} changes nothing in a saved plan.",
            help="give the YAML file that it is of, to plan anew.",
        )


def _require_writable(output: Path, source: Path) -> None:
    """Before any work: the folder is there, and the file is not the one that is read."""
    if output.exists() and source.exists() and output.samefile(source):
        raise ConfigError(f"--output {output} is the file that is read.", help="give another path.")
    if not output.parent.is_dir():
        raise ConfigError(
            f"--output {output}: there is no folder {output.parent}.", help=f"make it first: mkdir -p {output.parent}."
        )


def main() -> None:
    """The script ``piper``."""
    try:
        app(prog_name="piper")
    except SystemExit as ended:
        end_in_order(ended)
