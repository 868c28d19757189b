"""The source of a plan: the traced model, loss and optimizer, kept beside the DAG until lowering."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from piper_jax.errors import TraceError
from piper_jax.planning.structure import Structure
from piper_jax.tracing.batch_layout import BatchLayout
from piper_jax.tracing.chunk import chunks
from piper_jax.tracing.expert_units import Units
from piper_jax.tracing.loss_program import LossProgram, trace_loss
from piper_jax.tracing.model_state import ModelState
from piper_jax.tracing.optimizer_program import OptimizerProgram
from piper_jax.tracing.structure import fingerprint
from piper_jax.tracing.unit_costs import named, unit_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Everything that lowering needs besides the DAG.

    Attributes:
      program: the loss at the global batch size.
      units: of its equations.
      bucket_leaves: indices of the state leaves of each bucket.
      values: names of ``Dag.values`` -> values of the flat program.
      optimizer: the partitioned update, None for plans that only evaluate.
      bucket_names: bucket names by the index that ``optimizer`` uses.
      structure: the program as text, for saved plans.
      uncounted: a line for each annotated region that is no unit.
      undivided: a line for each equation that holds much of the model and is one unit.
      known: the loss at other batch sizes that were asked for.
    """

    loss_fn: Callable[..., Any]
    state: ModelState
    batch: BatchLayout
    program: LossProgram
    units: Units
    bucket_leaves: Mapping[str, tuple[int, ...]]
    values: Mapping[str, int]
    optimizer: OptimizerProgram | None
    bucket_names: tuple[str, ...]
    structure: Structure
    forward_only: bool = False
    uncounted: tuple[str, ...] = ()
    undivided: tuple[str, ...] = ()
    known: dict[int, LossProgram] = field(default_factory=dict, compare=False, repr=False)

    @property
    def fingerprint(self) -> str:
        """Identifies the structure."""
        return fingerprint(self.structure)

    def at(self, size: int) -> LossProgram:
        """The loss at another batch size (a slice); equation by equation the same program.

        Raises:
          TraceError: the model's Python code does something else at this size.
        """
        if size not in self.known:
            self.known[size] = matched(self.program, self.trace_at(size), size)
        return self.known[size]

    def op_costs(self, ops: Sequence[tuple[tuple[int, ...], str | None]]) -> list[dict[str, Any]]:
        """The cost fields of operations made of these units with these remat policies, for the whole batch.

        Args:
          ops: ``(units, policy)`` of each operation; together they are all units.
        """
        costs = []
        paths, names = [leaf.path for leaf in self.state.leaves], {v: name for name, v in self.values.items()}
        for part, (_, policy) in zip(chunks(self.program, self.units.of_eqn, [u for u, _ in ops]), ops, strict=True):
            costs.append(named(unit_costs(self.program, part, policy), part, paths, names))
        return costs

    def trace_at(self, size: int) -> LossProgram:
        return trace_loss(self.loss_fn, self.state, self.batch, size, forward_only=self.forward_only)


def matched(program: LossProgram, other: LossProgram, size: int) -> LossProgram:
    """``other`` with the metric kinds of ``program``, if both are the same program at different batch sizes."""
    ours, theirs = (
        [(e.name, e.inputs if all(isinstance(a, int) for a in e.inputs) else len(e.inputs)) for e in p.flat.eqns]
        for p in (program, other)
    )
    if ours != theirs:
        where = next(
            (k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        eqn = program.flat.eqns[min(where, len(ours) - 1)]
        raise TraceError(
            f"trace: the model computes something else for a batch of {size} rows, from `{eqn.name}` at "
            f"{eqn.path or 'the loss function'} on.",
            help="its Python code branches on the batch size (some libraries do for one row); "
            "use jnp.where, or larger slices.",
        )
    kinds = zip(other.metrics, program.metrics, strict=True)
    return replace(other, metrics=tuple(replace(mine, kind=known.kind) for mine, known in kinds))
