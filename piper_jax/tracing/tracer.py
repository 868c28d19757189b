"""``piper.trace``: a loss function and an optimizer become ONE global training DAG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from piper_jax import _jax_compat
from piper_jax.arguments import checked
from piper_jax.errors import TraceError
from piper_jax.ir.dag import Coupling, Dag
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Bucket, Compute, DataEdge, Op, OrderEdge, Update, Value
from piper_jax.planning import Plan
from piper_jax.tracing.chunk import Chunk, chunks
from piper_jax.tracing.expert_units import Units, divided_at_experts
from piper_jax.tracing.flat import Atom, FlatEqn
from piper_jax.tracing.loss_program import (
    LossProgram,
    Metric,
    MetricKind,
    batch_layout,
    require_loss,
    trace_layers,
    trace_loss,
)
from piper_jax.tracing.model_state import ModelState, model_state, nbytes
from piper_jax.tracing.naming import bucket_leaves, unit_names
from piper_jax.tracing.optimizer_program import OptimizerProgram, trace_optimizer
from piper_jax.tracing.regions import assign_units, uncounted_regions
from piper_jax.tracing.source import Source, matched
from piper_jax.tracing.structure import structure
from piper_jax.tracing.unit_costs import named, signature, unit_costs


@checked(TraceError)
def trace(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    optimizer: Any = None,
    wrt: Any = None,
    forward_only: bool = False,
) -> Plan:
    """Traces one training step into a Plan; touches no device and computes nothing.

    Args:
      loss_fn: ``loss_fn(params_or_model, batch[, rng]) -> loss | (loss, aux) | WeightedLoss``, pure. ``rng`` is the key
        of the slice.
      params: a pytree of arrays or ``jax.ShapeDtypeStruct``, or an ``nnx.Module``. Non-array leaves are static.
      batch: a pytree of arrays ``[batch, ...]`` or their shapes; scalars are shared by all slices.
      optimizer: an ``optax.GradientTransformation``; without one gradients are reduced, and the updates change nothing.
      wrt: for modules, the Variable filter that is trained (``nnx.Param``).
      forward_only: ``loss_fn`` may return anything; the plan has forward passes alone.

    Returns:
      A Plan with one operation per region (or automatic cut point), not yet placed.

    Raises:
      TraceError: what cannot be planned, with the module path and the line.
    """
    require_loss(loss_fn)
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TraceError(
            f"trace: optimizer is a {type(optimizer).__name__}, without init and update.",
            help="pass an optax.GradientTransformation such as optax.adamw(1e-3).",
        )
    layout = batch_layout(batch)
    state, program = trace_layers(loss_fn, model_state(params, wrt), layout, forward_only=forward_only)
    doubled = trace_loss(loss_fn, state, layout, 2 * layout.size, forward_only=forward_only)
    batch_dims = _batch_dims(program, matched(program, doubled, 2 * layout.size))
    program = replace(program, metrics=_reductions(program, doubled, batch_dims))
    state = state.carrying({change.leaf: change.carry for change in program.carried})
    units = divided_at_experts(program, assign_units(program))
    if not units.places:
        raise TraceError(
            "trace: nothing in the loss depends on both the parameters and the batch.",
            help="the loss function must use its first two arguments.",
        )
    parts = chunks(program, units.of_eqn, [[u] for u in range(len(units.places))])
    _refuse_carrying_experts(program, state, units, parts)
    return _Assembly(loss_fn, state, layout, program, units, parts, batch_dims, optimizer, forward_only).plan()


def _refuse_carrying_experts(program: LossProgram, state: ModelState, units: Units, parts: Sequence[Chunk]) -> None:
    changing = {change.leaf for change in program.carried}
    for place, part in zip(units.places, parts, strict=True):
        inside = {*part.state, *(program.carried[i].leaf for i in part.carried)} & changing
        if place.EP is not None and inside:
            raise TraceError(
                f"trace: {state.leaves[min(inside)].path} changes, and an expert region reads or changes it.",
                help="change state outside of piper.expert_region, and pass it what it reads as an argument.",
            )


def _batch_dims(program: LossProgram, doubled: LossProgram) -> tuple[int | None, ...]:
    """For each value, the dimension that grows with the batch."""
    pairs = zip(program.flat.avals, doubled.flat.avals, strict=True)
    return tuple(
        next((d for d, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b), None)
        for one, two in pairs
    )


def _reductions(program: LossProgram, doubled: LossProgram, batch_dims: Sequence[int | None]) -> tuple[Metric, ...]:
    """How metrics are combined where the user did not say: rows in order, what no batch changes as it is."""
    return tuple(
        metric if metric.explicit else replace(metric, kind=_kind(program, metric, other.atom, batch_dims))
        for metric, other in zip(program.metrics, doubled.metrics, strict=True)
    )


def _kind(program: LossProgram, metric: Metric, doubled: Atom, batch_dims: Sequence[int | None]) -> MetricKind:
    if not isinstance(metric.atom, int):
        return metric.kind if metric.atom.val != doubled.val else "last"  # type: ignore[union-attr]
    if (dim := batch_dims[metric.atom]) is not None and dim > 0:
        raise TraceError(
            f"trace: the auxiliary output {metric.path or 'aux'} has the batch on dimension {dim}.",
            help="put the batch on dimension 0, or reduce it inside the loss function.",
        )
    if not program.data_dependent[metric.atom]:
        return "last"
    return "samples" if dim == 0 else metric.kind


@dataclass(slots=True)
class _Assembly:
    loss_fn: Callable[..., Any]
    state: ModelState
    layout: Any
    program: LossProgram
    units: Units
    parts: Sequence[Chunk]
    batch_dims: tuple[int | None, ...]
    optimizer: Any
    forward_only: bool

    def plan(self) -> Plan:
        names = unit_names(
            self.state, self.parts, [self._unit_eqns(u) for u in range(len(self.parts))], self.units.places
        )
        readers = self._readers(names)
        leaves_of = bucket_leaves(self.state, readers)
        bucket_names = tuple(b for b, leaves in leaves_of.items() if self.state.leaves[leaves[0]].kind == "trainable")
        update = self._optimizer(leaves_of, bucket_names)
        value_names = self._value_names()
        ops = self._ops(names, leaves_of, value_names)
        dag = Dag(
            nodes=self._nodes(ops, () if self.forward_only else bucket_names),
            data=tuple(self._edges(ops, leaves_of, value_names)),
            order=() if self.forward_only else tuple(self._update_order(ops, bucket_names, leaves_of)),
            ops=ops,
            values=self._values(names, leaves_of, value_names, ops),
            buckets=self._buckets(leaves_of, bucket_names, update),
            couplings=_couplings(update, bucket_names) if update else (),
        )
        source = Source(
            loss_fn=self.loss_fn, state=self.state, batch=self.layout, program=self.program, units=self.units,
            bucket_leaves=leaves_of, values={name: v for v, name in value_names.items()}, optimizer=update,
            bucket_names=bucket_names, forward_only=self.forward_only, uncounted=uncounted_regions(self.program),
            structure=structure(self.program.flat, self.state, update, self.units.of_eqn, names),
        )  # fmt: skip
        return Plan(dag=dag, history=(), source=source)

    def _unit_eqns(self, unit: int) -> list[FlatEqn]:
        return [self.program.flat.eqns[i] for i, u in enumerate(self.units.of_eqn) if u == unit]

    def _readers(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """For each state leaf, the operations that read or change it; other leaves live with the first."""
        found: list[list[str]] = [[] for _ in self.state.leaves]
        for name, part in zip(names, self.parts, strict=True):
            for leaf in sorted({*part.state, *self._changed(part)}):
                found[leaf].append(name)
        return [tuple(r) or (names[0],) for r in found]

    def _changed(self, part: Chunk) -> list[int]:
        return [self.program.carried[i].leaf for i in part.carried]

    def _optimizer(
        self, bucket_leaves: Mapping[str, tuple[int, ...]], bucket_names: Sequence[str]
    ) -> OptimizerProgram | None:
        if self.optimizer is None:
            return None
        of_leaf = {leaf: k for k, b in enumerate(bucket_names) for leaf in bucket_leaves[b]}
        return trace_optimizer(self.optimizer, self.state, [of_leaf[i] for i in self.state.trainable])

    def _value_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        wanted = {v for part in self.parts for v in part.exports}
        for index, eqn in enumerate(self.program.flat.eqns):
            for k, value in enumerate(eqn.outputs):
                if value in wanted:
                    names[value] = f"{eqn.name}.{index}" + (f".{k}" if len(eqn.outputs) > 1 else "")
        return names

    def _ops(
        self, names: Sequence[str], bucket_leaves: Mapping[str, tuple[int, ...]], values: Mapping[int, str]
    ) -> dict[str, Op]:
        costs: dict[Any, dict[str, Any]] = {}
        ops = {}
        paths = [leaf.path for leaf in self.state.leaves]
        read = {leaf for part in self.parts for leaf in (*part.state, *self._changed(part))}
        weight = self.program.weight_leaves
        for unit, (name, part) in enumerate(zip(names, self.parts, strict=True)):
            alike = signature(self.program, part)
            if alike not in costs:
                costs[alike] = unit_costs(self.program, part)
            own, place = self._unit_eqns(unit), self.units.places[unit]
            changed = set(self._changed(part))
            reads = [b for b, leaves in bucket_leaves.items() if set(leaves) & {*part.state, *changed}]
            unread = [b for b, leaves in bucket_leaves.items() if unit == 0 and not read & set(leaves)]
            totals = any(self.program.terms[t][0] == "total" for t in part.terms)
            weighs = totals and isinstance(self.program.weight, int)
            leaves = sorted({*part.batch, *(weight if weighs else ())})
            ops[name] = Op(
                name=name, units=(unit,), PP=place.PP, EP=place.EP, path=name, source=_first_line(own),
                reads=(*reads, *unread), carries=tuple(b for b in reads if changed & set(bucket_leaves[b])),
                row_bound=place.bound, batch_inputs=tuple(self.layout.paths[i] for i in leaves),
                has_backward=part.has_backward and not self.forward_only,
                needs_weight=weighs,
                **named(costs[alike], part, paths, values),
            )  # fmt: skip
        return ops

    def _nodes(self, ops: Mapping[str, Op], updates: Iterable[str]) -> dict[NodeId, Any]:
        forward = [_node(op, "F") for op in ops.values()]
        backward = [_node(op, "B") for op in reversed(ops.values()) if op.has_backward]
        nodes: dict[NodeId, Any] = {i: Compute(id=i) for i in (*forward, *backward)}
        for bucket in updates:
            node = NodeId(f"update {bucket}", "U")
            nodes[node] = Update(id=node, buckets=(bucket,))
        return nodes

    def _edges(
        self,
        ops: Mapping[str, Op],
        bucket_leaves: Mapping[str, tuple[int, ...]],
        values: Mapping[int, str],
    ) -> Iterable[DataEdge]:
        home = {v: k for k, part in enumerate(self.parts) for v in part.exports}
        forward = [_node(op, "F") for op in ops.values()]
        backward = [_node(op, "B") for op in ops.values()]
        for k, part in enumerate(self.parts):
            for source, found in _grouped((home[v], v) for v in part.externals).items():
                yield DataEdge(forward[source], forward[k], tuple(values[v] for v in found))
        if self.forward_only:
            return
        for k, part in reversed(list(enumerate(self.parts))):
            if not part.has_backward:
                continue
            yield DataEdge(forward[k], backward[k], (f"residuals {forward[k].op}",))
            for source, found in _grouped((home[v], v) for v in part.diff_externals).items():
                yield DataEdge(backward[k], backward[source], tuple(f"d {values[v]}" for v in found))
            for bucket, leaves in bucket_leaves.items():
                if set(leaves) & set(part.diff_state):
                    yield DataEdge(backward[k], NodeId(f"update {bucket}", "U"), (f"gradient {bucket}",))

    def _update_order(
        self, ops: Mapping[str, Op], bucket_names: Iterable[str], bucket_leaves: Mapping[str, tuple[int, ...]]
    ) -> Iterable[OrderEdge]:
        """Whoever reads a bucket without giving it a gradient still reads before it is updated."""
        for op, part in zip(ops.values(), self.parts, strict=True):
            last = _node(op, "B" if op.has_backward else "F")
            for bucket in bucket_names:
                gives = op.has_backward and set(bucket_leaves[bucket]) & set(part.diff_state)
                if bucket in op.reads and not gives:
                    yield OrderEdge(last, NodeId(f"update {bucket}", "U"), "read before update")

    def _values(
        self,
        names: Sequence[str],
        bucket_leaves: Mapping[str, tuple[int, ...]],
        value_names: Mapping[int, str],
        ops: Mapping[str, Op],
    ) -> dict[str, Value]:
        batch = zip(self.layout.paths, self.layout.specs, strict=True)
        table = {f"batch {path}": _batch_value(path, spec) for path, spec in batch}
        active = {v for part in self.parts for v in part.diff_exports}
        for value, name in value_names.items():
            aval = self.program.flat.avals[value]
            known = Value(
                name=name, shape=tuple(aval.shape), dtype=str(aval.dtype), batch_dim=self.batch_dims[value],
                nbytes=nbytes(aval),
            )  # fmt: skip
            table[name] = known
            if value in active:
                table[f"d {name}"] = replace(known, name=f"d {name}")
        for name in names:
            size = ops[name].residual_bytes
            table[f"residuals {name}"] = Value(name=f"residuals {name}", nbytes=size, shape=(size,), dtype="uint8")
        for bucket, leaves in bucket_leaves.items():
            size = sum(self.state.leaves[i].nbytes for i in leaves)
            for kind in ("parameters", "gradient"):
                table[f"{kind} {bucket}"] = Value(name=f"{kind} {bucket}", nbytes=size, shape=(size,), dtype="uint8")
        return table

    def _buckets(
        self,
        bucket_leaves: Mapping[str, tuple[int, ...]],
        bucket_names: Sequence[str],
        update: OptimizerProgram | None,
    ) -> dict[str, Bucket]:
        sizes = dict.fromkeys(bucket_leaves, 0)
        for leaf, owner in enumerate(update.leaf_owner if update else ()):
            if owner is not None:
                sizes[bucket_names[owner]] += update.leaf_nbytes(leaf)  # type: ignore[union-attr]
        apart = update.elementwise.buckets if update else range(len(bucket_names))
        whole = {name for b, name in enumerate(bucket_names) if b not in apart}
        return {
            name: Bucket(
                name=name, leaves=tuple(self.state.leaves[i] for i in leaves), optimizer_bytes=sizes[name],
                elementwise=name not in whole,
            )
            for name, leaves in bucket_leaves.items()
        }  # fmt: skip


def _batch_value(path: str, spec: Any) -> Value:
    rows = 0 if spec.shape else None
    return Value(name=f"batch {path}", shape=spec.shape, dtype=str(spec.dtype), batch_dim=rows, nbytes=nbytes(spec))


def _node(op: Op, PASS: str) -> NodeId:
    return NodeId(op.name, PASS, PP=op.PP, EP=op.EP)


def _first_line(eqns: Iterable[FlatEqn]) -> str:
    """The first line of the user's own code among the equations' sources."""
    return next(filter(None, (_jax_compat.user_line(e.eqn) for e in eqns)), "")


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return dict(sorted(found.items()))


def _couplings(update: OptimizerProgram, bucket_names: Sequence[str]) -> tuple[Coupling, ...]:
    everyone = tuple(bucket_names)
    return tuple(
        Coupling(round=k, buckets=everyone, nbytes=sum(nbytes(update.flat.avals[v]) for v in values))
        for k, values in enumerate(update.exchanged)
    )
