"""The traced units of a loss function as operations, nodes, edges, values and state buckets of a DAG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from piper_jax import _jax_compat
from piper_jax.ir.dag import Coupling, Dag
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Bucket, Compute, DataEdge, Op, OrderEdge, Update, Value
from piper_jax.planning import Plan
from piper_jax.tracing.chunk import Chunk
from piper_jax.tracing.expert_units import Units
from piper_jax.tracing.flat import FlatEqn
from piper_jax.tracing.loss_program import LossProgram
from piper_jax.tracing.model_state import ModelState, nbytes
from piper_jax.tracing.naming import bucket_leaves, unit_names
from piper_jax.tracing.optimizer_program import OptimizerProgram, trace_optimizer
from piper_jax.tracing.regions import uncounted_regions
from piper_jax.tracing.source import Source
from piper_jax.tracing.structure import structure
from piper_jax.tracing.undivided import undivided
from piper_jax.tracing.unit_costs import named, unit_costs


@dataclass(slots=True)
class Assembly:
    """Turns a traced loss, cut into units, into a DAG. Lives inside one call of ``trace``."""

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
            buckets=self._buckets(ops, leaves_of, bucket_names, update),
            couplings=_couplings(update, bucket_names) if update else (),
            common_optimizer_bytes=_common_bytes(update) if update else 0,
        )
        source = Source(
            loss_fn=self.loss_fn, state=self.state, batch=self.layout, program=self.program, units=self.units,
            bucket_leaves=leaves_of, values={name: v for v, name in value_names.items()}, optimizer=update,
            bucket_names=bucket_names, forward_only=self.forward_only, uncounted=uncounted_regions(self.program),
            undivided=undivided(self.program),
            structure=structure(
                self.program.flat, self.state, update, self.units.of_eqn, names, self.layout, dag.buckets, dag.couplings
            ),
        )  # fmt: skip
        return Plan(dag=dag, history=(), source=source)

    def _unit_eqns(self, unit: int) -> list[FlatEqn]:
        return [self.program.flat.eqns[i] for i, u in enumerate(self.units.of_eqn) if u == unit]

    def _readers(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """For each state leaf, the operations that read or change it."""
        found: list[list[str]] = [[] for _ in self.state.leaves]
        for name, part in zip(names, self.parts, strict=True):
            for leaf in sorted({*part.state, *self._changed(part)}):
                found[leaf].append(name)
        return [tuple(r) for r in found]

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
        ops = {}
        paths = [leaf.path for leaf in self.state.leaves]
        unread = self._unread(bucket_leaves)
        home = next((unit for unit, place in enumerate(self.units.places) if place.EP is None), 0)
        weight = self.program.weight_leaves
        for unit, (name, part) in enumerate(zip(names, self.parts, strict=True)):
            own, place = self._unit_eqns(unit), self.units.places[unit]
            changed = set(self._changed(part))
            reads = [b for b, leaves in bucket_leaves.items() if set(leaves) & {*part.state, *changed}]
            totals = any(self.program.terms[t][0] == "total" for t in part.terms)
            weighs = totals and isinstance(self.program.weight, int)
            leaves = sorted({*part.batch, *(weight if weighs else ())})
            ops[name] = Op(
                name=name, units=(unit,), PP=place.PP, EP=place.EP, path=name, source=_first_line(own),
                reads=(*reads, *(unread if unit == home else ())),
                carries=tuple(b for b in reads if changed & set(bucket_leaves[b])),
                row_bound=place.bound, batch_inputs=tuple(self.layout.paths[i] for i in leaves),
                has_backward=part.has_backward and not self.forward_only,
                needs_weight=weighs,
                **named(unit_costs(self.program, part), part, paths, values),
            )  # fmt: skip
        return ops

    def _unread(self, bucket_leaves: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Buckets that no operation reads; they lie with the first that is no expert region."""
        read = {leaf for part in self.parts for leaf in (*part.state, *self._changed(part))}
        return [b for b, leaves in bucket_leaves.items() if not read & set(leaves)]

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
        ops: Mapping[str, Op],
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
        unread = self._unread(bucket_leaves)
        return {
            name: Bucket(
                name=name, leaves=tuple(self.state.leaves[i] for i in leaves), optimizer_bytes=sizes[name],
                elementwise=name not in whole, unread=name in unread,
                changed_by=tuple(op.name for op in ops.values() if name in op.carries),
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


def _common_bytes(update: OptimizerProgram) -> int:
    """Of the optimizer arrays that belong to no one bucket, such as moments of all parameters in one vector."""
    leaves = zip(update.leaf_specs, update.leaf_owner, strict=True)
    return sum(nbytes(spec) for spec, owner in leaves if owner is None and spec.size > 1)
