"""Named strategies: how they are registered and found."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Literal

from piper_jax.arguments import checked, require_call, shown
from piper_jax.errors import DirectiveError, PiperError, suggest
from piper_jax.planning.history import SHIPPED, failing_line, first_line, is_shipped, user_line
from piper_jax.planning.plan import Plan
from piper_jax.planning.strategies import StrategyOptions

Phase = Literal["schedule", "shard", "replicate", "remat"]
PHASES: tuple[Phase, ...] = ("schedule", "shard", "replicate", "remat")
StrategyFunction = Callable[[Plan, StrategyOptions], Plan]
SHARED_OPTIONS: Mapping[str, str] = {
    "memory_optimization": '"activation_checkpointing": activations are computed again in the backward pass',
}
"""What every schedule takes; :func:`piper_jax.planning.composition.compose` carries it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A named strategy: a function from plan and options to plan, its phase, and its options with their meanings."""

    name: str
    phase: Phase
    options: Mapping[str, str]
    function: StrategyFunction
    file: str

    @property
    def place(self) -> str:
        """``my_schedule.py:30``, where the function begins."""
        return f"{Path(self.file).name}:{self.function.__code__.co_firstlineno}"

    @property
    def is_shipped(self) -> bool:
        """Whether it came with piper."""
        return is_shipped(self.file)


_registered: dict[str, Registered] = {}
_loaded: dict[Path, ModuleType] = {}


def strategy(
    name: str, *, phase: Phase = "schedule", options: Mapping[str, str] | None = None
) -> Callable[[StrategyFunction], StrategyFunction]:
    """Registers a strategy under a name, so that ``piper.directive(name)`` finds it.

    ::

        @piper.strategy("Mine", options={"depth": "how many microbatches are in flight"})
        def mine(plan, options):
            return plan.cut(stages=options.pipeline_parallel)...

    Args:
      name: how directives call it.
      phase: ``"schedule"`` for what cuts, splits, places and orders (one per plan), else ``"shard"``, ``"replicate"``
        or ``"remat"``.
      options: the names of its own options with their meanings; any other is an error for its users. Schedules take
        ``memory_optimization`` besides.

    Raises:
      DirectiveError: the name is no name, what it names is no function, or another file has registered it.
    """
    _require_name(name)
    at = f"strategy({name!r}) at {user_line()}: "
    require_call(strategy, (name,), {"phase": phase, "options": options}, DirectiveError, place=at, apart=("phase",))
    if phase not in PHASES:
        raise DirectiveError(f"{at}there is no phase {phase!r}.", help=suggest(str(phase), PHASES))

    def register(function: StrategyFunction) -> StrategyFunction:
        if not inspect.isfunction(function):
            raise DirectiveError(
                f"{at}{shown(function)} is no function.",
                help="put it above a def of (plan, options).",
            )
        file = function.__code__.co_filename
        known = _registered.get(name)
        if known is not None and known.file != file and Path(known.file).is_file():  # no cell of a notebook
            raise DirectiveError(
                f"strategy {name!r} is registered twice.",
                detail=(f"in {known.file}", f"and in {file}"),
                help="give one of them another name.",
            )
        _registered[name] = Registered(
            name=name,
            phase=phase,
            options={**(options or {}), **(SHARED_OPTIONS if phase == "schedule" else {})},
            function=function,
            file=file,
        )
        return function

    return register


def _require_name(name: object) -> None:
    at = f" at {user_line()}"
    if inspect.isfunction(name):
        raise DirectiveError(f"@piper.strategy{at} has no name.", help=f'write @piper.strategy("{name.__name__}").')
    if not isinstance(name, str):
        raise DirectiveError(f"strategy({name!r}){at}: a name is a string.", help='such as @piper.strategy("Mine").')
    if not name.strip() or not name.isprintable():
        raise DirectiveError(
            f"strategy({name!r}){at}: a name is one line of printable text.", help='such as @piper.strategy("Mine").'
        )


@checked(DirectiveError)
def find_strategy(name: str) -> Registered:
    """The strategy of this name.

    Raises:
      DirectiveError: there is none; the message suggests the nearest.
    """
    known = strategies()
    if name not in known:
        called = [k for k, item in known.items() if f"also called {name.upper()}." in (item.function.__doc__ or "")]
        fix = f"did you mean {called[0]!r}?" if called else suggest(name, known)
        raise DirectiveError(f"there is no strategy {name!r}.", help=fix)
    return known[name]


def strategies() -> Mapping[str, Registered]:
    """All registered strategies by name, those that come with piper included."""
    folder = directives_folder()
    if folder is not None:
        for path in sorted(folder.glob("*.py")):
            if path.name != "__init__.py":
                load_strategies(path)
    return dict(sorted(_registered.items()))


def strategies_text(known: Iterable[Registered]) -> str:
    """Strategies with their options as a Markdown table, as in ``docs/strategies.md``."""
    rows = ["| Strategy | Phase | What it does | Option | Meaning |", "| --- | --- | --- | --- | --- |"]
    for item in known:
        first = [item.name, item.phase, (item.function.__doc__ or "").strip().splitlines()[0]]
        for option, meaning in item.options.items() or (("", ""),):
            rows.append(f"| {' | '.join((*first, f'`{option}`' if option else '', meaning))} |")
            first = ["", "", ""]
    return "\n".join(rows) + "\n"


@checked(DirectiveError)
def load_strategies(path: str | PathLike[str]) -> ModuleType:
    """Runs a file that registers strategies, once.

    Raises:
      DirectiveError: there is no such file, or it raises.
    """
    path = Path(path).resolve()
    if path in _loaded:
        return _loaded[path]
    if not path.is_file():
        raise DirectiveError(f"there is no file {path}.", help="give the path of a Python file with @piper.strategy.")
    name = f"piper_directives_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise DirectiveError(f"{path} is not a Python file.", help="give the path of a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except DirectiveError:
        raise
    except Exception as error:
        line = failing_line(error, str(path)) or path.name
        said = f"{type(error).__name__}: {error.what}" if isinstance(error, PiperError) else first_line(error)
        raise DirectiveError(f"{path} fails at {line}: {said}", help="correct the file.") from error
    _loaded[path] = module
    return module


def directives_folder() -> Path | None:
    """Where the strategies lie: inside the package when installed, beside it in a source tree."""
    return next((folder for folder in SHIPPED if folder.is_dir()), None)
