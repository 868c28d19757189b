"""What every part of the lowering looks up: chunks and passes at slice shapes, groups, owners."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from piper_jax.ir.carried import carried
from piper_jax.ir.dag import Dag
from piper_jax.ir.device_groups import REPLICA_AXES
from piper_jax.ir.ids import NodeId
from piper_jax.ir.nodes import Collective, Compute, Send
from piper_jax.ir.ownership import Ownership, ownerships
from piper_jax.lowering.group_mesh import SLICE, GroupMesh
from piper_jax.lowering.keys import Key
from piper_jax.tracing.chunk import Chunk, chunks
from piper_jax.tracing.dispatch import Dispatch, dispatch
from piper_jax.tracing.local_experts import EXPERT_AXIS
from piper_jax.tracing.loss_program import LossProgram
from piper_jax.tracing.passes import Passes, passes
from piper_jax.tracing.replica import Replica
from piper_jax.tracing.source import Source


@dataclass(frozen=True, kw_only=True)
class Tables:
    """A completed DAG about to be lowered for one batch size.

    Attributes:
      dag: completed.  source: the trace behind it.  program: the loss at the shape of a slice.
      batch_size: rows of the whole batch; a slice has ``batch_size / (microbatches * replicas)``.
      training: False to lower forward passes only.
      process: the one whose part is lowered, of several that run the plan together; None drives all devices itself.
    """

    dag: Dag
    source: Source
    program: LossProgram
    meshes: Mapping[str, GroupMesh]
    batch_size: int
    training: bool
    process: int | None = None

    def is_here(self, group: str) -> bool:
        """Whether this process has devices of a group."""
        return self.process is None or self.process in self.meshes[group].processes

    def is_alone(self, *groups: str) -> bool:
        """Whether all devices of these groups are of one process."""
        return self.process is None or len({p for g in groups for p in self.meshes[g].processes}) == 1

    @cached_property
    def here(self) -> tuple[str, ...]:
        """The groups of which this process has devices."""
        return tuple(g for g in self.meshes if self.is_here(g))

    @property
    def num_microbatches(self) -> int:
        return self.dag.num_microbatches

    @cached_property
    def replicas(self) -> int:
        """Into how many slices each microbatch is divided: the devices of the largest group, its tensor axis aside."""
        return max(m.replicas for m in self.meshes.values())

    def slices_on(self, group: str) -> int:
        """How many slices of a microbatch each device of a group has: more than one where others have more devices."""
        return self.replicas // self.meshes[group].replicas

    def replicas_before(self, owned: Ownership, group: str) -> int:
        """The replicas of the owners that come before one of them."""
        return sum(self.meshes[owner].replicas for owner in owned.owners[: owned.owners.index(group)])

    def replica(self, group: str) -> Replica:
        """What evaluates equations inside the programs of a group."""
        return Replica(self.replica_axes(group), self._names_divided)

    @cached_property
    def _names_divided(self) -> frozenset[str]:
        """Names of dimensions that the tensor axis divides."""
        leaves = [leaf for bucket in self.dag.buckets.values() for leaf in bucket.leaves if leaf.axis_names]
        names = (leaf.axis_names[leaf.tensor_dim] or "" for leaf in leaves if leaf.tensor_dim is not None)
        return frozenset(name for text in names for name in text.split())

    def replica_axes(self, group: str) -> tuple[str, ...]:
        """The axes, in a program of a group, along which slices lie."""
        return REPLICA_AXES if self.slices_on(group) == 1 else (*REPLICA_AXES, SLICE)

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

    def carried_key(self, group: str, leaf: int, op: str) -> Key:
        """Where an operation leaves the next value of a state leaf, and finds it where it is in turn."""
        return Key("carried", group, leaf, op=op if self.carry_of(leaf) == "equal" else None)

    def carried_keys(self, group: str, bucket: str) -> list[tuple[Key, ...]]:
        """For each leaf of a bucket of carried state, all of these on a group; they are equal at the end of a step."""
        own = {n.id.op for n in self.dag.nodes.values() if isinstance(n, Compute) and n.group == group}
        ops = [op for op in self.chunk_of if op in own and bucket in self.dag.ops[op].reads]
        leaves = self.source.bucket_leaves[bucket]
        return [tuple(dict.fromkeys(self.carried_key(group, leaf, op) for op in ops)) for leaf in leaves]

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

    @cached_property
    def trainable_index(self) -> dict[int, int]:
        """State leaf -> its position among the trainable leaves."""
        return {leaf: k for k, leaf in enumerate(self.source.state.trainable)}
