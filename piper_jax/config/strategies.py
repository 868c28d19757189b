"""The strategy section as a ``piper.Strategy``."""

from __future__ import annotations

from piper_jax.config.schema import Config, DirectiveSection
from piper_jax.errors import ConfigError, DirectiveError, suggest
from piper_jax.planning import Directive, Strategy, find_strategy, load_strategies


def planned_strategy(config: Config) -> Strategy:
    """Builds the strategy; loads the user's own files first.

    Raises:
      ConfigError: a file that fails, a strategy that does not exist, or an option that it does not have.
    """
    section = config.strategy
    for index, file in enumerate(section.files):
        try:
            load_strategies(file)
        except DirectiveError as error:
            raise ConfigError(
                f"{section.place('files', index)}: {error.what}", detail=error.detail, help=error.help
            ) from None
    named = [_directive(item, section.place("directives", index)) for index, item in enumerate(section.directives)]
    strategy = Strategy(
        data_parallel=section.data_parallel,
        pipeline_parallel=section.pipeline_parallel,
        expert_parallel=section.expert_parallel,
        tensor_parallel=section.tensor_parallel,
        zero_stage=section.zero_stage,
        num_microbatches=section.num_microbatches,
        stages=section.stages,
        memory_limit=section.memory_limit,
        directives=tuple(named),
    )
    return strategy.written_at(section.place())


def _directive(item: DirectiveSection, at: str) -> Directive:
    try:
        registered = find_strategy(item.name)
    except DirectiveError as error:
        raise ConfigError(f"{at}: strategy.directives: {error.what}", help=error.help) from None
    for name in item.options:
        if name not in registered.options:
            fix = suggest(name, registered.options) if registered.options else f"{item.name} has no options."
            raise ConfigError(f"{at}: strategy.directives: {item.name} has no option {name!r}.", help=fix)
    return Directive(item.name, item.options, line=at)
