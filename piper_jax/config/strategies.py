"""The strategy section as a ``piper.Strategy``."""

from __future__ import annotations

from collections.abc import Callable

from piper_jax.config.schema import Config, DirectiveSection
from piper_jax.config.text import Path
from piper_jax.errors import ConfigError, DirectiveError, suggest
from piper_jax.planning import Directive, Strategy, directive, find_strategy, load_strategies

Place = Callable[[Path], str]


def planned_strategy(config: Config, place: Place = lambda path: "strategy") -> Strategy:
    """Builds the strategy; loads the user's own files first.

    Args:
      place: path of keys within the section -> where it was written, for messages.

    Raises:
      ConfigError: a file that fails, a strategy that does not exist, or an option that it does not have.
    """
    section = config.strategy
    for index, file in enumerate(section.files):
        try:
            load_strategies(file)
        except DirectiveError as error:
            raise ConfigError(
                f"{place(('files', index))}: {error.what}", detail=error.detail, help=error.help
            ) from None
    named = [_directive(item, place(("directives", index))) for index, item in enumerate(section.directives)]
    return Strategy(
        data_parallel=section.data_parallel,
        pipeline_parallel=section.pipeline_parallel,
        expert_parallel=section.expert_parallel,
        tensor_parallel=section.tensor_parallel,
        zero_stage=section.zero_stage,
        num_microbatches=section.num_microbatches,
        directives=tuple(named),
    )


def _directive(item: DirectiveSection, at: str) -> Directive:
    try:
        registered = find_strategy(item.name)
    except DirectiveError as error:
        raise ConfigError(f"{at}: strategy.directives: {error.what}", help=error.help) from None
    for name in item.options:
        if name not in registered.options:
            fix = suggest(name, registered.options) if registered.options else f"{item.name} has no options."
            raise ConfigError(f"{at}: strategy.directives: {item.name} has no option {name!r}.", help=fix)
    return directive(item.name, **item.options)
