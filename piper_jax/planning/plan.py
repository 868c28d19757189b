"""The plan: a DAG, the directives that made it, and the program that it was traced from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, NoReturn, Protocol

from piper_jax.arguments import checked, require_call
from piper_jax.errors import ConfigError, DirectiveError, FilterError, PlanError, suggest, writing
from piper_jax.hints import From
from piper_jax.ir.collector import collector_paused
from piper_jax.ir.dag import Dag
from piper_jax.ir.filters import Filter
from piper_jax.ir.forward import ForwardMap
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import DeviceGroup
from piper_jax.ir.rules import DEADLOCK_FREE, FITS_IN_MEMORY, RULES, Rule, check
from piper_jax.ir.selection import is_split
from piper_jax.planning.completion import complete
from piper_jax.planning.history import Applied, at_line, earlier, user_line
from piper_jax.planning.structure import Structure, differences
from piper_jax.primitives import PRIMITIVES
from piper_jax.primitives.rematerialization import policy_name
from piper_jax.primitives.tensor import pairs

FILTERS = ("filter", "slots")  # arguments that say themselves what they are
SPLIT_FIELDS = ("splittable", "whole_because")


class Source(Protocol):
    """The traced program behind a plan; only lowering looks inside."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def structure(self) -> Structure: ...

    @property
    def uncounted(self) -> Sequence[str]:
        """A line for each annotated region that is no unit."""
        ...

    @property
    def undivided(self) -> Sequence[str]:
        """A line for each equation that holds much of the model and is one unit."""
        ...

    def op_costs(self, ops: Sequence[tuple[tuple[int, ...], str | None]]) -> Sequence[Mapping[str, Any]] | None:
        """The cost fields of operations made of these units with these remat policies, or None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbound:
    """Stands for the program of a loaded plan until ``plan.bind``."""

    fingerprint: str = ""
    structure: Structure = field(default_factory=dict)
    uncounted: tuple[str, ...] = ()
    undivided: tuple[str, ...] = ()

    def op_costs(self, ops: Sequence[tuple[tuple[int, ...], str | None]]) -> None:
        """Operations keep the costs that they have."""
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One training step over all devices, as a value: every directive returns a new plan.

    Attributes:
      dag: the DAG as the directives left it; :meth:`complete` gives it with all communication.
      history: the primitive directives so far. ``fresh.replay(plan.history) == plan``.
      source: the traced program, or :class:`Unbound`.
      forward: what became of each node since the plan was traced or loaded, one to many.
    """

    dag: Dag
    history: tuple[Applied, ...] = ()
    source: Source = field(default_factory=Unbound, compare=False)
    forward: ForwardMap = field(default=ForwardMap(), compare=False, repr=False)

    # -- directives ---------------------------------------------------------------------------------------------
    def cut(self, *, stages: int | Sequence[Sequence[int]] | Sequence[str]) -> Plan:
        """Groups neighbouring units into stages; see :func:`piper_jax.primitives.cut`."""
        return self._rewritten("cut", stages=stages)

    def split(self, filter: Filter, *, num_microbatches: int, coordinate: str = "MB") -> Plan:
        """Divides the batch into microbatches; see :func:`piper_jax.primitives.split`."""
        return self._rewritten("split", filter=filter, num_microbatches=num_microbatches, coordinate=coordinate)

    def place(self, filter: Filter, *, group: DeviceGroup | Sequence[int] | int | str, stream: str = "compute") -> Plan:
        """Runs nodes on a group of devices; see :func:`piper_jax.primitives.place`."""
        return self._rewritten("place", filter=filter, group=group, stream=stream)

    def shard(
        self, filter: Filter, *, axis: str = "expert", stream: str = "compute", rules: Any = None, dims: Any = None
    ) -> Plan:
        """Divides experts or parameters over a mesh axis; see :func:`piper_jax.primitives.shard`."""
        given = {name: pairs(value, name) for name, value in (("rules", rules), ("dims", dims)) if value is not None}
        return self._rewritten("shard", filter=filter, axis=axis, stream=stream, **given)

    def replicate(self, filter: Filter, *, axes: str | Sequence[str] = ("data",), **options: Any) -> Plan:
        """Data parallelism and ZeRO; see :func:`piper_jax.primitives.replicate`."""
        return self._rewritten("replicate", filter=filter, axes=axes, **options)

    def remat(self, filter: Filter, *, policy: str | Callable[..., object] = "nothing_saveable") -> Plan:
        """Activation checkpointing; see :func:`piper_jax.primitives.remat`. JAX's own policies are taken by name."""
        return self._rewritten("remat", filter=filter, policy=policy_name(policy))

    def order(self, slots: Sequence[Filter | tuple[Filter, ...]]) -> Plan:
        """What runs one after another and what overlaps; see :func:`piper_jax.primitives.order`."""
        return self._rewritten("order", slots=tuple(slots) if isinstance(slots, list) else slots)

    def apply(self, strategy: object) -> Plan:
        """Applies the named directives of a :class:`piper_jax.Strategy`, phase by phase."""
        from piper_jax.planning.composition import compose

        return compose(self, strategy)

    @checked(DirectiveError)
    def replay(self, history: Sequence[Applied]) -> Plan:
        """Applies recorded directives again, such as those of another plan or a loaded one."""
        plan = self
        for record in history:
            plan = plan._apply(record)
        return plan

    # -- facts ----------------------------------------------------------------------------------------------------
    @property
    def num_stages(self) -> int:
        """The number of PP coordinates."""
        return len({node.PP for node in self.dag.nodes if node.PP is not None})

    @property
    def num_microbatches(self) -> int:
        """1 before split."""
        return self.dag.num_microbatches

    @property
    def is_split(self) -> bool:
        return is_split(self.dag)

    @property
    def groups(self) -> Mapping[str, DeviceGroup]:
        """The device groups that place directives named."""
        return self.dag.groups

    @property
    def fingerprint(self) -> str:
        """Identifies the structure of the traced program."""
        return self.source.fingerprint

    def complete(self) -> Dag:
        """The DAG with every communication and update; computed once. See :mod:`piper_jax.planning.completion`."""
        known = self.dag.memo.get("completed")
        if known is None:
            with collector_paused():
                known = self.dag.memo["completed"] = complete(self.dag)
        return known

    @checked(PlanError)
    def check(self, *, memory_limit: Annotated[int, From(0)] | None = None) -> Plan:
        """Holds the completed plan against every rule of the checker.

        Args:
          memory_limit: bytes that each device may hold by the simulator's count, or None for any.

        Returns:
          This plan, so that calls chain.

        Raises:
          PlanError: a rule is broken; the message names it.
        """
        self._hold(RULES)
        if memory_limit is not None:
            from piper_jax.simulation import simulate

            peaks = {group.name: group.memory.needed_bytes for group in simulate(self).groups}
            check(self.complete(), memory_limit=memory_limit, peak_bytes=peaks, rules=(FITS_IN_MEMORY,))
        return self

    def require_sound(self) -> None:
        """Holds the completed plan against the rules that a simulation needs: all but the one that it breaks itself.

        Raises:
          PlanError: as :meth:`check`.
        """
        self._hold([rule for rule in RULES if rule is not DEADLOCK_FREE])

    # -- in and out -------------------------------------------------------------------------------------------------
    @checked(ConfigError)
    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan as JSON, without the program; :func:`piper_jax.load_plan` reads it.

        Raises:
          ConfigError: the file cannot be written.
        """
        from piper_jax.planning.storage import plan_json

        text = plan_json(self)
        with writing(path):
            Path(path).write_text(text)

    def bind(self, loss_fn: Any, params: Any, batch: Any, *, optimizer: Any = None, **options: Any) -> Plan:
        """Gives a loaded plan the program that it was made from, so that it can run.

        Args:
          loss_fn, params, batch, optimizer: as for ``piper.trace``; shapes are enough.
          **options: further arguments of ``piper.trace``.

        Raises:
          PlanError: the program has another structure than the one that the plan was made for.
        """
        from piper_jax.tracing import trace

        fresh: Plan = trace(loss_fn, params, batch, optimizer=optimizer, **options)
        if fresh.fingerprint != self.fingerprint:
            raise PlanError(
                "bind: this plan was made for another program.",
                detail=differences(self.source.structure, fresh.source.structure),
                help="bind the same model, batch shapes and optimizer, or trace and plan anew.",
            )
        return replace(self, source=fresh.source)

    def __str__(self) -> str:
        from piper_jax.planning.display import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from piper_jax.visualization.notebook import plan_html

        return plan_html(self)

    # -- inside -------------------------------------------------------------------------------------------------------
    def _hold(self, rules: Iterable[Rule]) -> None:
        """Holds the completed plan against each rule, once; errors name the user's directive."""
        dag, known = self.complete(), self.dag.memo.setdefault("rules", set[str]())
        pending = [rule for rule in rules if rule.name not in known]
        try:
            check(dag, slots=self.dag.slots, rules=pending)
        except PlanError as error:
            name, node = str(error.data["directive"]), error.data.get("node")
            cause = earlier(self.history, self.dag, name, node if isinstance(node, NodeId) else NodeId(""))
            if cause is None:
                raise
            at = at_line(f"{name}[{self.history.index(cause)}]", cause.line)
            rule, _, fault = error.what.partition(": ")
            raise PlanError(f"{rule}: {at}: {fault}", detail=error.detail, help=error.help, **error.data) from None
        known.update(rule.name for rule in pending)

    def _rewritten(self, name: str, **arguments: object) -> Plan:
        return self._apply(Applied(name=name, arguments=tuple(arguments.items()), line=user_line()))

    def _apply(self, record: Applied) -> Plan:
        arguments = dict(record.arguments)
        try:
            if record.name not in PRIMITIVES:
                raise DirectiveError("there is no such directive.", help=suggest(record.name, PRIMITIVES))
            require_call(PRIMITIVES[record.name], (self.dag,), arguments, DirectiveError, apart=FILTERS)
            with collector_paused():
                dag, forward = PRIMITIVES[record.name](self.dag, **arguments)
        except (DirectiveError, FilterError) as error:
            self._raise_located(error, record)
        if record.name in ("cut", "remat"):
            dag = _with_costs(dag, self.source, kept=SPLIT_FIELDS if record.name == "remat" else ())
        return replace(self, dag=dag, history=(*self.history, record), forward=self.forward.then(forward))

    def _raise_located(self, error: DirectiveError | FilterError, record: Applied) -> NoReturn:
        """The same error, with the directive, its number and the user's line, and what it contradicts."""
        detail = (*error.detail, *((*self.source.uncounted, *self.source.undivided) if "units" in error.data else ()))
        conflict, node = error.data.get("conflict"), error.data.get("node")
        if isinstance(conflict, str):
            other = earlier(self.history, self.dag, conflict, node if isinstance(node, NodeId) else NodeId(""))
            if other is not None:
                detail = (*detail, f"by {other.place}", f"and {record.place}")
        what = f"{at_line(f'{record.name}[{len(self.history)}]', record.line)}: {error.what}"
        placed = {"place": record.line} if record.line else {}
        raise type(error)(what, detail=detail, help=error.help, **(error.data | placed)) from None


def _with_costs(dag: Dag, source: Source, kept: Collection[str] = ()) -> Dag:
    """Counts costs of merged or rematerialized operations anew: residuals are not the sum of those of the parts.

    Whether a backward is split is no matter of remat, which may come after the order: these fields are ``kept``.
    """
    costs = source.op_costs([(op.units, op.remat) for op in dag.ops.values()])
    if costs is None:
        return dag
    ops = {
        name: replace(op, **{field: value for field, value in known.items() if field not in kept})
        for (name, op), known in zip(dag.ops.items(), costs, strict=True)
    }
    residuals = {f"residuals {name}": op.residual_bytes for name, op in ops.items()}
    values = {
        name: replace(value, nbytes=residuals[name], shape=(residuals[name],)) if name in residuals else value
        for name, value in dag.values.items()
    }
    return replace(dag, ops=ops, values=values)
