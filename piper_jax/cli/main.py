"""Commands and their arguments. JAX is imported by the command that needs it, after its devices are prepared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from piper_jax.cli import commands
from piper_jax.cli.boundary import exit_code
from piper_jax.config import Config, load_config

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


@app.command()
def train(config: ConfigPath, overrides: Overrides = None, directive: Directives = None) -> None:
    """Train a model: shows the plan, the progress and the held-out loss."""
    _run(commands.train, config, overrides, directive)


@app.command()
def plan(config: ConfigPath, overrides: Overrides = None, directive: Directives = None) -> None:
    """Print the plan of a configuration; no device is touched."""
    _run(commands.plan, config, overrides, directive)


@app.command()
def check(config: ConfigPath, overrides: Overrides = None, directive: Directives = None) -> None:
    """Compare one planned step with the same step on one device: loss and every gradient."""
    _run(commands.check, config, overrides, directive)


@app.command()
def config(config: ConfigPath, overrides: Overrides = None, directive: Directives = None) -> None:
    """Print a configuration with every default, as YAML."""
    _run(commands.show_config, config, overrides, directive)


def _run(
    command: Callable[[Config], int], path: Path, overrides: list[str] | None, directives: list[Path] | None
) -> NoReturn:
    """Loads the configuration, runs the command and exits with its code."""
    given = list(overrides or [])
    if directives:
        given.append(f"strategy.files=[{', '.join(repr(str(file)) for file in directives)}]")
    raise typer.Exit(exit_code(lambda: command(load_config(path, given))))


def main() -> None:
    """The script ``piper``."""
    app(prog_name="piper")
