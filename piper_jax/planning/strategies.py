"""Strategies as values: degrees of parallelism and named directives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, TypeVar, cast

from piper_jax.arguments import checked, require_fields, shown
from piper_jax.errors import AnnotationError, DirectiveError, suggest
from piper_jax.hints import From
from piper_jax.ir.nodes import DeviceGroup
from piper_jax.planning.history import at_line, user_line

T = TypeVar("T")
Degree = Annotated[int, From(1)]
DEGREES = ("data_parallel", "pipeline_parallel", "expert_parallel", "tensor_parallel")


@dataclass(frozen=True, slots=True, init=False)
class Directive:
    """A named strategy with its options: a value, and a decorator of model classes. Made by :func:`directive`.

    Attributes:
      line: ``train.py:12``, where it was written, for messages; no part of the value.
    """

    name: str
    options: tuple[tuple[str, object], ...]
    line: str = field(compare=False, repr=False)

    def __init__(self, name: str, options: Mapping[str, object], line: str | None = None):
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "options", tuple(options.items()))
        object.__setattr__(self, "line", user_line() if line is None else line)

    @property
    def place(self) -> str:
        """As it was written, and where: how a message about it begins."""
        return at_line(str(self), self.line)

    def __call__(self, cls: type[T]) -> type[T]:
        """Marks a model class; several decorators read from top to bottom."""
        if not isinstance(cls, type):
            raise AnnotationError(f"{self}: {shown(cls)} is not a class.", help="put it above the class of a model.")
        below = cls.__dict__.get("__piper_directives__", ())
        cast(Any, cls).__piper_directives__ = (self, *below)
        return cls

    def __str__(self) -> str:
        return f"directive({', '.join([repr(self.name), *(f'{k}={v!r}' for k, v in self.options)])})"


@checked(DirectiveError)
def directive(name: str, **options: object) -> Directive:
    """Names a strategy, such as ``directive("DualPipeV", communication_overlap=True)``.

    Args:
      name: a registered strategy: one of those that come with piper, or your own (see :func:`piper_jax.strategy`).
      **options: what the strategy declares; anything else is an error when it is applied.

    Returns:
      A value for ``Strategy(directives=...)`` that is also a class decorator.
    """
    return Directive(name, options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How one training step is spread over devices.

    Mesh axes multiply: devices = data x pipeline x expert x tensor.

    Attributes:
      data_parallel, pipeline_parallel, expert_parallel, tensor_parallel: degrees, at least 1.
      zero_stage: 0 to 3; k is short for ``directive("ZeRO-k")``.
      num_microbatches: per step; None means twice the pipeline degree, or 1 without pipeline.
      stages: the module paths of each stage, ``("embed, layers.0-2", "layers.3-5, head")``; None: cut by cost.
      memory_limit: bytes that each device may hold by the simulator's count; automatic stages are cut so that they fit,
        with the least work for the largest that was found. Others are checked.
      directives: named strategies, or a single one; the schedule is 1F1B where none is named.
      line: ``train.py:12``, where it was written, for messages; no part of the value, and nothing to give.
    """

    data_parallel: Degree = 1
    pipeline_parallel: Degree = 1
    expert_parallel: Degree = 1
    tensor_parallel: Degree = 1
    zero_stage: Annotated[int, From(0, 3)] = 0
    num_microbatches: Degree | None = None
    stages: tuple[str, ...] | None = None
    memory_limit: Annotated[int, From(1)] | None = None
    directives: tuple[Directive, ...] = ()
    line: str = field(default="", init=False, compare=False, repr=False)

    def __new__(cls, *args: object, **given: object) -> Strategy:
        """Refuses a misspelt degree before the generated ``__init__`` does, with a suggestion."""
        names = [f.name for f in fields(cls) if f.init]
        if args:
            raise DirectiveError(f"Strategy: {shown(args[0])} has no name.", help="such as Strategy(data_parallel=2).")
        for name in given:
            if name not in names:
                raise DirectiveError(f"Strategy has no {name!r}.", help=suggest(name, names))
        return object.__new__(cls)

    def __post_init__(self) -> None:
        named: object = self.directives
        listed = tuple(cast(Sequence[object], named)) if isinstance(named, tuple | list) else (named,)
        for item in listed:
            if not isinstance(item, Directive):
                fix = (
                    f"write piper.directive({item!r})." if isinstance(item, str) else 'such as piper.directive("1F1B").'
                )
                raise DirectiveError(f"Strategy: {shown(item)} is not a directive.", help=fix)
        object.__setattr__(self, "directives", listed)
        if isinstance(self.stages, list):
            object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "line", user_line())
        require_fields(self, DirectiveError, "Strategy: ")

    @classmethod
    def of(cls, model: object) -> Strategy:
        """The strategy that a model class (or an instance of it) is annotated with.

        Raises:
          AnnotationError: the annotation names a degree that does not exist.
        """
        degrees: Mapping[str, int] = getattr(model, "__piper_degrees__", {})
        known = tuple(f.name for f in fields(cls) if f.init and f.name != "directives")
        for name in degrees:
            if name not in known:
                raise AnnotationError(f"annotate({name}=...): there is no degree {name!r}.", help=suggest(name, known))
        return cls(directives=getattr(model, "__piper_directives__", ()), **cast(Any, dict(degrees)))

    @property
    def num_devices(self) -> int:
        """The product of all degrees."""
        return self.data_parallel * self.pipeline_parallel * self.expert_parallel * self.tensor_parallel

    @property
    def resolved_num_microbatches(self) -> int:
        """The number given, or twice the pipeline degree, or 1 without pipeline."""
        default = 2 * self.pipeline_parallel if self.pipeline_parallel > 1 else 1
        return default if self.num_microbatches is None else self.num_microbatches

    def written_at(self, line: str) -> Strategy:
        """The same strategy, as written at ``line``, such as that of a configuration."""
        other = replace(self)
        object.__setattr__(other, "line", line)
        return other

    def __str__(self) -> str:
        degrees = [f for f in fields(self) if f.init and f.name != "directives"]
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in degrees if getattr(self, f.name) != f.default]
        named = [f"directives=({', '.join(map(str, self.directives))},)"] if self.directives else []
        return f"Strategy({', '.join([*given, *named])})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyOptions:
    """What a strategy function gets: the resolved degrees, the device groups, and the directive's own options.

    ``options["name"]``, ``options.get("name", default)`` and ``options.choice("name", legal)`` read the latter;
    ``directive`` is the name by which the strategy was called.
    """

    directive: str = ""
    data_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    tensor_parallel: int = 1
    zero_stage: int = 0
    num_microbatches: int = 1
    own: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, strategy: Strategy, own: Mapping[str, Any], directive: str = "") -> StrategyOptions:
        """The options with which a directive of ``strategy`` is applied."""
        shared: dict[str, Any] = {name: getattr(strategy, name) for name in (*DEGREES, "zero_stage")}
        return cls(directive=directive, num_microbatches=strategy.resolved_num_microbatches, own=dict(own), **shared)

    @checked(DirectiveError)
    def group(self, rank: int) -> DeviceGroup:
        """The devices of a pipeline rank from 0: a group such as ``g0`` with axes data, expert and tensor."""
        if not 0 <= rank < self.pipeline_parallel:
            raise DirectiveError(
                f"there is no pipeline rank {rank}.", help=f"ranks are 0 to {self.pipeline_parallel - 1}."
            )
        axes = (("data", self.data_parallel), ("expert", self.expert_parallel), ("tensor", self.tensor_parallel))
        size = self.data_parallel * self.expert_parallel * self.tensor_parallel
        return DeviceGroup(name=f"g{rank}", devices=tuple(range(rank * size, (rank + 1) * size)), axes=axes)

    def get(self, name: str, default: Any = None) -> Any:
        """The directive's own option, or ``default``."""
        return self.own.get(name, default)

    @checked(DirectiveError)
    def choice(self, name: str, legal: Sequence[Any]) -> Any:
        """The directive's own option, one of ``legal``; the first of them where it is not given.

        Raises:
          DirectiveError: the option has another value.
        """
        value = self.own.get(name, legal[0])
        if any(value == known and type(value) is type(known) for known in legal):
            return value
        known = suggest(value, legal) if isinstance(value, str) and all(isinstance(k, str) for k in legal) else None
        raise DirectiveError(
            f"{name}={value!r} is not a choice.",
            help=known or f"use {' or '.join(repr(k) for k in legal)}.",
        )

    @checked(DirectiveError)
    def require_microbatches(self, *, multiple_of: Degree = 1, at_least: Degree = 1, rule: str) -> None:
        """Refuses a number of microbatches for which the schedule is not defined.

        Args:
          multiple_of, at_least: the legal numbers.
          rule: the same in words, such as ``"a multiple of the pipeline degree"``.

        Raises:
          DirectiveError: names the rule and the nearest legal numbers.
        """
        count = self.num_microbatches
        least = -(-at_least // multiple_of) * multiple_of
        if count % multiple_of == 0 and count >= least:
            return
        near = {max(least, count // multiple_of * multiple_of), max(least, -(-count // multiple_of) * multiple_of)}
        raise DirectiveError(
            f"{self.directive} takes {rule}, not num_microbatches={count}.",
            help=f"use num_microbatches={' or '.join(str(n) for n in sorted(near))}.",
        )

    def __getitem__(self, name: str) -> Any:
        if name not in self.own:
            raise DirectiveError(f"option {name!r} is not given.", help="use options.get(name, default).")
        return self.own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)
