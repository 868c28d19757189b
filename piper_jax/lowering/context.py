"""What every part of the lowering looks up: chunks and passes at slice shapes, groups, owners."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from piper_jax.errors import PlanError, counted
from piper_jax.ir.carried import carried
from piper_jax.ir.dag import Dag
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, Send
from piper_jax.ir.ownership import Ownership, ownerships
from piper_jax.lowering.group_mesh import PARTITION, TENSOR, GroupMesh, P, group_mesh
from piper_jax.lowering.keys import Key, Layout
from piper_jax.lowering.shards import shard_length
from piper_jax.tracing.chunk import Chunk, chunks
from piper_jax.tracing.dispatch import Dispatch, dispatch
from piper_jax.tracing.local_experts import EXPERT_AXIS
from piper_jax.tracing.loss_program import LossProgram, key_spec
from piper_jax.tracing.passes import Passes, passes
from piper_jax.tracing.source import Source


@dataclass(frozen=True, kw_only=True)
class Context:
    """A completed DAG about to be lowered for one batch size.

    Attributes:
      dag: completed.  source: the trace behind it.  program: the loss at the shape of a slice.
      batch_size: rows of the whole batch; a slice has ``batch_size / (microbatches * replicas)``.
      training: False to lower forward passes only.
    """

    dag: Dag
    source: Source
    program: LossProgram
    meshes: Mapping[str, GroupMesh]
    batch_size: int
    training: bool

    @property
    def num_microbatches(self) -> int:
        return self.dag.num_microbatches

    @cached_property
    def replicas(self) -> int:
        return next(iter(self.meshes.values())).replicas

    @cached_property
    def has_streams(self) -> bool:
        """Whether devices run programs in the order in which they are given. CPU devices start what is ready.

        There each device that waits in a collective holds a thread of a pool that has one for each device: if two
        collectives of a group could start in either order, or a program waited for room on a device while it holds a
        thread, all threads would wait for each other.
        """
        return next(iter(self.meshes.values())).devices[0].platform != "cpu"

    def chain_of(self, node: Collective) -> str:
        """The chain on which a collective of a program follows others.

        CPU devices have no streams: a collective that could start in either order there may wait for ever.
        """
        return node.stream if self.has_streams else ""

    @property
    def needs_tokens(self) -> bool:
        """Whether the programs of a group, each on several devices, are chained by a token."""
        return self.replicas * self.tensor > 1 and not self.has_streams

    @cached_property
    def tensor(self) -> int:
        """Devices along the tensor axis, over which the compiler divides what works on the parameters."""
        return next(iter(self.meshes.values())).tensor

    @property
    def num_slices(self) -> int:
        return self.num_microbatches * self.replicas

    @cached_property
    def chunk_of(self) -> dict[str, Chunk]:
        built = chunks(self.program, self.source.units.of_eqn, [op.units for op in self.dag.ops.values()])
        return dict(zip(self.dag.ops, built, strict=True))

    @cached_property
    def _passes(self) -> dict[str, Passes]:
        return {}

    def passes(self, op: str) -> Passes:
        """The passes of an operation, traced once."""
        if op not in self._passes:
            self._passes[op] = passes(self.program, self.chunk_of[op], self.dag.ops[op].remat, self.dispatch_of(op))
        return self._passes[op]

    @cached_property
    def _dispatches(self) -> dict[str, Dispatch]:
        placed = {n.id.op: str(n.group) for n in self.dag.nodes.values() if isinstance(n, Compute)}
        found: dict[str, Dispatch] = {}
        for name, op in self.dag.ops.items():
            parts = self.meshes[placed[name]].mesh.shape[EXPERT_AXIS] if op.shard_axis == EXPERT_AXIS else 1
            if parts > 1:
                bound = self.source.units.places[op.units[0]].bound
                found[name] = dispatch(self.program, self.chunk_of[name], name, parts, bound)
        return found

    def dispatch_of(self, op: str) -> Dispatch | None:
        """How the experts of an operation are divided over devices; None for others."""
        return self._dispatches.get(op)

    @cached_property
    def value_of(self) -> Mapping[int, str]:
        return {v: name for name, v in self.source.values.items()}

    @cached_property
    def cotangent_givers(self) -> dict[int, list[str]]:
        """For each value, the operations whose backward gives a cotangent of it, in order."""
        givers: dict[int, list[str]] = {}
        for op, chunk in self.chunk_of.items():
            for value in chunk.diff_externals:
                givers.setdefault(value, []).append(op)
        return givers

    @cached_property
    def _producers(self) -> dict[NodeId, NodeId]:
        return {edge.dst: edge.src for edge in self.dag.data if isinstance(self.dag.nodes[edge.dst], Send)}

    def giver_of(self, send: NodeId) -> str:
        """The operation whose values a Send carries, of experts those that have left them."""
        producer = self._producers[send]
        found = (e.src.op for e in self.dag.data if e.dst == producer and e.src.op in self.dag.ops)
        return producer.op if producer.op in self.dag.ops else next(found)

    @cached_property
    def owners(self) -> dict[str, tuple[str, ...]]:
        """For each bucket, the groups that hold it, in group order."""
        readers: dict[str, set[str]] = {b: set() for b in self.dag.buckets}
        for node in self.dag.nodes.values():
            if isinstance(node, Compute):
                for bucket in self.dag.ops[node.id.op].reads:
                    readers[bucket].add(str(node.group))
        return {b: tuple(g for g in self.meshes if g in groups) for b, groups in readers.items()}

    @cached_property
    def group_leaves(self) -> dict[str, tuple[int, ...]]:
        """For each group, the state leaves it holds, ascending."""
        found: dict[str, set[int]] = {g: set() for g in self.meshes}
        for bucket, groups in self.owners.items():
            for group in groups:
                found[group].update(self.source.bucket_leaves[bucket])
        return {g: tuple(sorted(leaves)) for g, leaves in found.items()}

    @cached_property
    def owned(self) -> Mapping[str, Ownership]:
        """Owners and replication of each trainable bucket."""
        return ownerships(self.dag)

    @cached_property
    def carried(self) -> Mapping[str, Ownership]:
        """Owners of each bucket of state that steps carry on."""
        return carried(self.dag)

    def carry_of(self, leaf: int) -> str | None:
        """How steps carry a leaf on; None for other leaves, and for all of them when evaluating."""
        return self.source.state.leaves[leaf].carry if self.training else None

    def is_in_turn(self, leaf: int) -> bool:
        """Whether each microbatch sees what the one before it left of a leaf."""
        return self.carry_of(leaf) in ("sequential", "equal")

    @cached_property
    def owned_leaf(self) -> dict[int, Ownership]:
        """The same by state leaf."""
        return {leaf: o for bucket, o in self.owned.items() for leaf in self.source.bucket_leaves[bucket]}

    @cached_property
    def reduced(self) -> frozenset[str]:
        """Buckets whose gradients a collective sums; the others have one copy, or no gradient at all."""
        kinds = ("all_reduce", "reduce_scatter")
        found = (n for n in self.dag.nodes.values() if isinstance(n, Collective) and n.kind in kinds)
        return frozenset(v.removeprefix("gradient ") for n in found for v in n.values)

    @cached_property
    def with_gradient(self) -> frozenset[int]:
        """State leaves to which a backward gives a gradient; that of the others is zero."""
        return frozenset(leaf for chunk in self.chunk_of.values() for leaf in chunk.diff_state)

    def optimizer_leaves(self, buckets: Collection[str]) -> tuple[int, ...]:
        """Optimizer leaves that belong to these buckets."""
        program = self.source.optimizer
        found = enumerate(program.leaf_owner if program is not None else ())
        return tuple(k for k, o in found if o is not None and self.source.bucket_names[o] in buckets)

    def owned_key(self, key: Key) -> Ownership | None:
        """The owners of the bucket that a state, optimizer, gradient or accumulator key belongs to."""
        if not key.kind.startswith("optimizer"):
            return self.owned_leaf.get(key.item)
        bucket = self.source.optimizer.leaf_owner[key.item]  # type: ignore[union-attr]
        return None if bucket is None else self.owned.get(self.source.bucket_names[bucket])

    @cached_property
    def _parts_of_bucket(self) -> dict[str, int]:
        readers = {b: name for name in self._dispatches for b in self.dag.ops[name].reads}
        return {b: self._dispatches[name].num_parts for b, name in readers.items()}

    @cached_property
    def _bucket_of_leaf(self) -> dict[int, str]:
        return {leaf: b for b, leaves in self.source.bucket_leaves.items() for leaf in leaves}

    def parts_of(self, key: Key) -> int:
        """Over how many devices, each with other experts, the array is divided whose whole or sharded form a key names.

        Only state, optimizer leaves and gradients of experts are; a single number is on all of them.
        """
        if not self._parts_of_bucket:
            return 1
        kind, program = key.kind.removesuffix("_shard"), self.source.optimizer
        if kind == "optimizer" and program is not None:
            owner = program.leaf_owner[key.item]
            bucket = None if owner is None else self.source.bucket_names[owner]
            single = program.leaf_specs[key.item].shape == ()
        elif kind in ("state", "gradient", "accumulator", "unreduced"):
            bucket, single = self._bucket_of_leaf[key.item], False
        else:
            return 1
        return 1 if bucket is None or single else self._parts_of_bucket.get(bucket, 1)

    def layout(self, key: Key) -> Layout:
        """How a register is laid out on the mesh of its group."""
        return "experts" if key.layout == "replicated" and self.parts_of(key) > 1 else key.layout

    def partition(self, key: Key) -> P:
        """How a register lies on the mesh of its group, the tensor axis included."""
        spec = PARTITION[self.layout(key)]
        dim = self.tensor_dim(key)
        return spec if dim is None else P(*spec, *[None] * (dim - len(spec)), TENSOR)

    @cached_property
    def _shardings(self) -> dict[tuple[str, P], NamedSharding]:
        return {}

    def sharding(self, key: Key) -> NamedSharding:
        """The same on its devices."""
        known = key.group, self.partition(key)
        if known not in self._shardings:
            self._shardings[known] = NamedSharding(self.meshes[key.group].mesh, known[1])
        return self._shardings[known]

    def tensor_dim(self, key: Key) -> int | None:
        """The dimension of a register that the tensor axis divides; of activations the compiler finds it."""
        if self.tensor == 1:
            return None
        kind, _, form = key.kind.partition("_")
        if form == "shard":
            length = shard_length(self.whole_spec(key).shape, self.shards_of(key))
            return 1 if length % self.tensor == 0 else None
        leaf = key.item
        if kind == "optimizer":
            leaf = self.like_parameter.get(key.item)
        if kind not in ("state", "gradient", "optimizer", "accumulator", "unreduced", "carried") or leaf is None:
            return None
        dim = self.leaf_tensor_dims.get(leaf)
        return None if dim is None else dim + (key.layout == "stacked")

    @cached_property
    def leaf_tensor_dims(self) -> dict[int, int]:
        """The divided dimension of each state leaf that has one."""
        pairs = (
            (index, leaf.tensor_dim)
            for bucket, leaves in self.source.bucket_leaves.items()
            for index, leaf in zip(leaves, self.dag.buckets[bucket].leaves, strict=True)
        )
        return {index: dim for index, dim in pairs if dim is not None}

    @cached_property
    def like_parameter(self) -> dict[int, int]:
        """For each optimizer leaf that has the shape of the parameter whose path ends its own, that parameter."""
        program, state = self.source.optimizer, self.source.state
        found: dict[int, int] = {}
        for k, path in enumerate(program.leaf_paths if program is not None else ()):
            for leaf in state.trainable:
                known = state.leaves[leaf]
                if path.endswith(known.path) and program.leaf_specs[k].shape == known.shape:  # type: ignore[union-attr]
                    found[k] = leaf
        return found

    def register_shape(self, key: Key, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of a register of which each device sees ``local``."""
        match self.layout(key):
            case "stacked":
                return (self.replicas, *local)
            case "batch":
                return (local[0], self.replicas, *local[1:])
            case "experts":
                return (local[0] * self.parts_of(key), *local[1:])
            case _:
                return tuple(local)

    def shards_of(self, key: Key) -> int:
        """Into how many shards ZeRO divides what a key, sharded or whole, belongs to."""
        owned = self.owned_key(key)
        return owned.num_shards if owned is not None else 1

    def held(self, group: str, leaf: int) -> Key:
        """A state leaf as a group keeps it between steps."""
        owned, key = self.owned_leaf.get(leaf), Key("state", group, leaf)
        sharded = owned is not None and owned.num_shards > 1 and owned.replication.shard_params
        return key.shard if sharded else key

    def accumulated(self, group: str, leaf: int) -> Key:
        """Where a group adds up the gradients of a trainable leaf: whole, or, reduced by spans, its shard."""
        key = Key("accumulator", group, leaf)
        return key if self.owned_leaf[leaf].span is None else key.shard

    def first_shard(self, key: Key) -> int:
        """The number of the first of the shards that the key's group holds."""
        owned = self.owned_key(key)
        return owned.owners.index(key.group) * self.replicas if owned is not None and len(owned.owners) > 1 else 0

    @cached_property
    def trainable_index(self) -> dict[int, int]:
        """State leaf -> its position among the trainable leaves."""
        return {leaf: k for k, leaf in enumerate(self.source.state.trainable)}

    def whole_spec(self, key: Key) -> jax.ShapeDtypeStruct:
        """Shape and dtype, before any sharding by ZeRO, of the array whose whole or sharded form a key names.

        Of divided experts it is what one device has.
        """
        whole, parts = self.logical_spec(key), self.parts_of(key)
        return whole if parts == 1 else whole.update(shape=(whole.shape[0] // parts, *whole.shape[1:]))

    def logical_spec(self, key: Key) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the leaf that a key belongs to, as the model or the optimizer has it."""
        match key.kind.removesuffix("_shard"):
            case "optimizer":
                return self.source.optimizer.leaf_specs[key.item]  # type: ignore[union-attr]
            case "accumulator" | "unreduced" | "carried_total":
                return self.accumulator_spec(key.item)
            case "carried":
                return self.leaf_spec(key.item) if self.is_in_turn(key.item) else self.accumulator_spec(key.item)
            case _:
                return self.leaf_spec(key.item)

    def leaf_spec(self, leaf: int) -> jax.ShapeDtypeStruct:
        aval = self.program.flat.avals[self.program.state_input(leaf)]
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    def accumulator_spec(self, leaf: int) -> jax.ShapeDtypeStruct:
        """Gradients, and what slices leave of carried state, are summed in at least 32 bits."""
        known = self.leaf_spec(leaf)
        is_float = jnp.issubdtype(known.dtype, jnp.inexact)
        return jax.ShapeDtypeStruct(
            known.shape, jnp.promote_types(known.dtype, jnp.float32 if is_float else known.dtype)
        )

    def metric_spec(self, item: Any) -> jax.ShapeDtypeStruct:
        """The accumulator of a partial loss ``(kind, op)`` or of metric ``index``, on one replica."""
        if isinstance(item, tuple):
            return jax.ShapeDtypeStruct((), jnp.float64 if jax.config.jax_enable_x64 else jnp.float32)
        metric = self.program.metrics[item]
        aval = self.program.flat.avals[metric.atom] if isinstance(metric.atom, int) else metric.atom.aval
        match metric.kind:
            case "samples":
                return jax.ShapeDtypeStruct((self.num_microbatches, *aval.shape), aval.dtype)
            case "last":
                return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            case "mean":
                return jax.ShapeDtypeStruct(aval.shape, jnp.promote_types(aval.dtype, jnp.float32))
            case "sum":
                dtype = jnp.promote_types(
                    aval.dtype, jnp.float32 if jnp.issubdtype(aval.dtype, jnp.inexact) else jnp.int32
                )
                return jax.ShapeDtypeStruct(aval.shape, dtype)

    def reduction_of(self, key: Key) -> str | None:
        """How a metric register takes in a slice's value; None for other registers and partial losses."""
        return self.program.metrics[key.item].kind if key.kind == "metric" and isinstance(key.item, int) else None

    @staticmethod
    def key_spec() -> jax.ShapeDtypeStruct:
        return key_spec()


def context(dag: Dag, source: Source, devices: Sequence[Any], batch_size: int, *, training: bool) -> Context:
    """Checks what the lowering supports and gathers its tables.

    Raises:
      PlanError: batch not divisible, groups of different size, or a directive that is not lowered yet.
    """
    used = {str(n.group) for n in dag.nodes.values() if isinstance(n, Compute)}
    meshes = {g: group_mesh(dag.groups[g], devices) for g in dag.groups if g in used}
    replicas = {g: m.replicas for g, m in meshes.items()}
    if len({(m.replicas, m.tensor) for m in meshes.values()}) > 1:
        raise PlanError(
            "compile: device groups of different size are planned, but not lowered yet.",
            detail=[f"{g}: {counted(m.replicas, 'replica')} x {m.tensor} tensor" for g, m in meshes.items()],
            help="give every stage the same number of devices.",
        )
    slices = dag.num_microbatches * next(iter(replicas.values()))
    if batch_size % slices or not batch_size:
        nearest = [n for n in (batch_size // slices * slices, -(-batch_size // slices) * slices) if n] or [slices]
        raise PlanError(
            f"compile: a batch of {counted(batch_size, 'row')} cannot be divided into "
            f"{counted(dag.num_microbatches, 'microbatch')} x "
            f"{counted(slices // dag.num_microbatches, 'replica')} = {counted(slices, 'slice')}.",
            help=f"use a batch of {' or '.join(map(str, nearest))} rows, or another num_microbatches.",
        )
    _refuse_unlowered(dag)
    return Context(
        dag=dag,
        source=source,
        program=source.at(batch_size // slices),
        meshes=meshes,
        batch_size=batch_size,
        training=training and not source.forward_only,
    )


def _refuse_unlowered(dag: Dag) -> None:
    def refuse(what: str, where: str) -> None:
        raise PlanError(f"compile: {what} ({where}) can be planned, checked and simulated, but is not lowered yet.")

    for op in dag.ops.values():
        if op.shard_axis not in (None, EXPERT_AXIS):
            refuse(f"sharding over {op.shard_axis}", f"operation {op.name}")
    for bucket, owned in ownerships(dag).items():
        if owned.num_parts > 1 and not owned.elementwise:
            raise PlanError(
                f"compile: the optimizer updates {bucket} in another way than element by element, which needs all of "
                f"its experts on one device.",
                help="use expert_parallel=1, or an elementwise optimizer (adamw, lion, sgd) for the experts.",
            )
