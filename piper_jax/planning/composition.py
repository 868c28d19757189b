"""Applying a strategy: its named directives, phase by phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from piper_jax.arguments import shown
from piper_jax.errors import DirectiveError, PiperError, counted, suggest
from piper_jax.ir.filters import where
from piper_jax.ir.nodes import Compute
from piper_jax.planning.fitting import fitted
from piper_jax.planning.history import at_line, failing_line, first_line
from piper_jax.planning.plan import Plan
from piper_jax.planning.registry import PHASES, Registered, find_strategy
from piper_jax.planning.strategies import Directive, Strategy, StrategyOptions

ZERO = ("ZeRO-1", "ZeRO-2", "ZeRO-3")
SCHEDULE, EXPERTS, TENSOR = "1F1B", "ExpertParallel", "TensorParallel"
REPLICAS, VIRTUAL = ("data", "expert"), "num_virtual_stages"
MEMORY_OPTIMIZATIONS = {"activation_checkpointing": "ActivationCheckpointing"}


def compose(plan: Plan, strategy: object) -> Plan:
    """The plan with all directives of ``strategy`` applied.

    Directives are sorted by phase, and by text within one, so their order in the text does not change the meaning. A
    missing schedule is 1F1B; a missing replication is plain data parallelism over the replicas.

    Raises:
      DirectiveError: an unknown name or option, or two directives that contradict each other.
    """
    if not isinstance(strategy, Strategy):
        raise DirectiveError(
            f"{shown(strategy)} is not a strategy.", help="write piper.Strategy(pipeline_parallel=4, ...)."
        )
    made, limit = _composed(plan, strategy, strategy.stages), strategy.memory_limit
    if limit is None:
        return made
    with _named(strategy):
        if strategy.stages is not None or len(made.dag.ops) == len(plan.dag.ops):
            return made.check(memory_limit=limit)
        return fitted(plan, made, limit, lambda stages: _composed(plan, strategy, stages))


@contextmanager
def _named(strategy: Strategy) -> Iterator[None]:
    """Errors of what follows from a field of the strategy say where it was written."""
    try:
        yield
    except PiperError as error:
        place = at_line("Strategy", strategy.line)
        if str(error.data.get("place", "")).startswith(place):
            raise
        data = error.data | {"place": place}
        raise type(error)(f"{place}: {error.what}", detail=error.detail, help=error.help, **data) from None


def _composed(plan: Plan, strategy: Strategy, stages: Sequence[str] | Sequence[Sequence[int]] | None) -> Plan:
    """The plan with all directives, cut into ``stages`` first where there are any."""
    wanted = _with_experts(plan, strategy, _with_tensor(strategy, _with_memory(_all_directives(strategy))))
    named = [(item, _found(item)) for item in wanted]
    for item, registered in named:
        _require_known_options(item, registered)
    _require_one_schedule(named)
    if not any(registered.phase == "schedule" for _, registered in named):
        named.insert(0, (_implied(SCHEDULE), find_strategy(SCHEDULE)))
    if stages is not None:
        with _named(strategy):
            plan = _written_at(strategy.line, plan, plan.cut(stages=stages))
    for item, registered in sorted(named, key=lambda pair: PHASES.index(pair[1].phase)):
        plan = _applied(plan, strategy, item, registered)
        if stages is not None and plan.num_stages != len(stages):
            raise DirectiveError(
                f"{at_line('Strategy', strategy.line)}: stages lists {len(stages)}, but {item.name} has "
                f"{plan.num_stages}.",
                help=f"list {counted(plan.num_stages, 'stage')}, or leave stages out.",
            )
    replicas = strategy.data_parallel * strategy.expert_parallel
    if replicas > 1 and not any(registered.phase == "replicate" for _, registered in named):
        plan = _written_at(strategy.line, plan, plan.replicate(where(), axes=REPLICAS))
    return plan


def _implied(name: str) -> Directive:
    """A directive that nobody wrote: messages name the strategy that it follows from."""
    return Directive(name, {}, line="")


def _found(item: Directive) -> Registered:
    try:
        return find_strategy(item.name)
    except DirectiveError as error:
        raise DirectiveError(f"{item.place}: {error.what}", help=error.help) from None


def _all_directives(strategy: Strategy) -> Sequence[Directive]:
    """The directives, with ``zero_stage`` as the one that it is short for."""
    listed = [item for item in strategy.directives if item.name in ZERO]
    named = [(item.name, item.place) for item in listed]
    if strategy.zero_stage:
        named.insert(0, (ZERO[strategy.zero_stage - 1], at_line(f"zero_stage={strategy.zero_stage}", strategy.line)))
    for name, place in named[1:]:
        if name != named[0][0]:
            raise DirectiveError(f"{named[0][1]} contradicts {place}.", help="name one ZeRO stage.")
    return strategy.directives if listed or not named else (*strategy.directives, _implied(named[0][0]))


def _with_experts(plan: Plan, strategy: Strategy, directives: Sequence[Directive]) -> Sequence[Directive]:
    """The directives, with ``expert_parallel`` above 1 as the one that it is short for."""
    if strategy.expert_parallel == 1 or any(item.name == EXPERTS for item in directives):
        return directives
    if all(op.EP is None for op in plan.dag.ops.values()):
        raise DirectiveError(
            f"{at_line(f'expert_parallel={strategy.expert_parallel}', strategy.line)}: the model has no expert region.",
            help="wrap its experts in piper.expert_region, or use data_parallel.",
        )
    return (*directives, _implied(EXPERTS))


def _with_tensor(strategy: Strategy, directives: Sequence[Directive]) -> Sequence[Directive]:
    """The directives, with ``tensor_parallel`` above 1 as the one that it is short for."""
    named = strategy.tensor_parallel == 1 or any(item.name == TENSOR for item in directives)
    return directives if named else (*directives, _implied(TENSOR))


def _with_memory(directives: Sequence[Directive]) -> Sequence[Directive]:
    """Directives that schedules ask for by their option ``memory_optimization`` as directives of their own."""
    listed: list[Directive] = []
    for item in directives:
        own = dict(item.options)
        wanted = own.get("memory_optimization") if _found(item).phase == "schedule" else None
        if wanted is None:
            listed.append(item)
            continue
        if not isinstance(wanted, str) or wanted not in MEMORY_OPTIMIZATIONS:
            raise DirectiveError(
                f"{item.place}: memory_optimization={shown(wanted)} is unknown.",
                help=suggest(str(wanted), MEMORY_OPTIMIZATIONS),
            )
        del own["memory_optimization"]
        listed += (Directive(item.name, own, item.line), Directive(MEMORY_OPTIMIZATIONS[wanted], {}, item.line))
    return listed


def _require_known_options(item: Directive, registered: Registered) -> None:
    for name, _ in item.options:
        if name not in registered.options:
            raise DirectiveError(
                f"{item.place}: option {name!r} means nothing to {item.name}.",
                detail=[f"{option}: {meaning}" for option, meaning in registered.options.items()],
                help=suggest(name, registered.options) if registered.options else f"{item.name} has no options.",
            )


def _require_one_schedule(named: Sequence[tuple[Directive, Registered]]) -> None:
    schedules = [item for item, registered in named if registered.phase == "schedule"]
    if len(schedules) > 1:
        raise DirectiveError(
            f"two schedules: {schedules[0].place} and {schedules[1].place}.",
            help="a schedule orders everything; name one.",
        )


def _applied(plan: Plan, strategy: Strategy, item: Directive, registered: Registered) -> Plan:
    try:
        result = registered.function(plan, StrategyOptions.of(strategy, dict(item.options), item.name))
    except PiperError as error:
        raise _located(error, strategy, item, registered) from None
    except Exception as error:
        at = failing_line(error, registered.file) or registered.place
        raise DirectiveError(
            f"strategy {item.name} fails at {at}: {first_line(error)}",
            help=f"correct {at.partition(':')[0]}; a strategy is a function of (plan, options).",
        ) from error
    if not isinstance(result, Plan):
        raise DirectiveError(
            f"strategy {item.name} at {registered.place} returned {type(result).__name__}, not a plan.",
            help="directives return new plans; end the function with return plan.",
        )
    if registered.phase == "schedule":
        _require_placed(result, item, registered)
    return _written_at(item.line or strategy.line, plan, result)


def _require_placed(plan: Plan, item: Directive, registered: Registered) -> None:
    nodes = plan.dag.nodes.values()
    missing = next((n.id for n in nodes if isinstance(n, Compute) and n.group is None), None)
    if missing is not None:
        raise DirectiveError(
            f"{item.place}: strategy {item.name} at {registered.place} left {missing} without a group.",
            help="a schedule places everything: plan.place(where(PP=...), group=options.group(rank)).",
        )


def _located(error: PiperError, strategy: Strategy, item: Directive, registered: Registered) -> PiperError:
    """The same error with the directive and where it was written; as it is, where it names a place of its own."""
    if error.data.get("place"):
        return error
    place = item.place if item.line else at_line("Strategy", strategy.line)
    own = "" if registered.is_shipped else failing_line(error, registered.file)
    place = f"{place}: {own}" if own else place
    help = _fewer_stages(error, strategy, item) or error.help
    return type(error)(f"{place}: {error.what}", detail=error.detail, help=help, **(error.data | {"place": place}))


def _fewer_stages(error: PiperError, strategy: Strategy, item: Directive) -> str:
    """The fix of too many stages in terms of what gives their number; "" for other errors."""
    units, stages = error.data.get("units"), error.data.get("stages")
    if strategy.stages is not None and isinstance(stages, int) and units == len(strategy.stages):
        return f"list {counted(stages, 'stage')}, or leave stages out."
    if not isinstance(units, int) or not isinstance(stages, int) or stages % strategy.pipeline_parallel:
        return ""
    ranks, each = strategy.pipeline_parallel, stages // strategy.pipeline_parallel
    fixes = [f"pipeline_parallel={units // each}"] if units >= each else []
    if VIRTUAL in _found(item).options and units >= ranks:
        fixes.append(f"{VIRTUAL}={units // ranks}")
    each_has = f"a rank has {each} stages: " if each > 1 else ""
    return f"{each_has}use {' or '.join(fixes)} at most, or more regions." if fixes else "annotate more regions."


def _written_at(line: str, before: Plan, plan: Plan) -> Plan:
    """The plan, whose primitive directives that have no line of the user's have that of the named one."""
    known = len(before.history)
    new = tuple(record if record.line else replace(record, line=line) for record in plan.history[known:])
    return replace(plan, history=(*plan.history[:known], *new))
