"""Sizes on one device: how microbatches, replicas and shards divide the global arrays of a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable

from piper_jax.ir.carried import carry_of
from piper_jax.ir.dag import Dag
from piper_jax.ir.device_groups import REPLICA_AXES, axis_size
from piper_jax.ir.nodes import Bucket, Leaf
from piper_jax.ir.ownership import ownerships, shard_axes_of


class Sizes:
    """Answers, for one plan, how many bytes of a value or of state one device of a group holds.

    A value with a batch dim is divided by the microbatches and by the replicas (axes data and expert) of the group; one
    without is whole on every device. State of expert regions is divided over the axis of its shard directive.
    """

    def __init__(self, dag: Dag):
        self._dag = dag
        self._owned = ownerships(dag)
        self._shard_axes = shard_axes_of(dag)

    def axis_size(self, group: str, axes: tuple[str, ...]) -> int:
        """Product of the named axes of ``group``; axes it lacks count as 1."""
        return axis_size(self._dag.groups[group], axes)

    def replicas(self, group: str) -> int:
        """Into how many parts the group divides each microbatch."""
        return self.axis_size(group, REPLICA_AXES)

    def num_devices(self, group: str) -> int:
        """Devices of ``group``."""
        return len(self._dag.groups[group].devices)

    def value_bytes(self, name: str, group: str) -> int:
        """Bytes on one device of ``group`` for one microbatch of the value ``name``; 0 if its size is unknown.

        ``gradient``, ``parameters`` and ``state`` of a bucket are sized from the bucket, ``residuals`` and ``weight
        residuals`` from the op.
        """
        word, _, rest = name.partition(" ")
        if word in ("gradient", "parameters", "state") and rest in self._dag.buckets:
            bucket = self._dag.buckets[rest]
            return self.optimizer_bytes(bucket, group) if word == "state" else self.bucket_bytes(bucket, group)
        op = self._dag.ops.get(name.removeprefix("weight ").removeprefix("residuals "))
        if op is not None and word in ("residuals", "weight"):
            kept, crossing = self.weight_residuals(op.name, group)
            return op.residual_bytes // self._parts(group) if word == "residuals" else kept + crossing
        value = self._dag.values.get(name)
        if value is None or value.batch_dim is None:
            return value.nbytes if value else 0
        return value.nbytes // self._parts(group)

    def batch_bytes(self, path: str, group: str) -> int:
        """Bytes of a leaf of the batch on one device: its rows of all microbatches; 0 if its size is unknown."""
        value = self._dag.values.get(f"batch {path}")
        if value is None:
            return 0
        return value.nbytes if value.batch_dim is None else value.nbytes // self.replicas(group)

    def weight_residuals(self, op: str, group: str) -> tuple[int, int]:
        """Bytes on one device that BI leaves for BW: of what it reads, and of what it computes."""
        known = self._dag.ops[op]
        kept = known.residual_bytes if known.kept_bytes is None else known.kept_bytes
        return kept // self._parts(group), known.crossing_bytes // self._parts(group)

    def residual_parts(self, op: str, group: str) -> tuple[int, int, int]:
        """Bytes on one device that F leaves for BI alone, and for BW as well, and that BI leaves for BW.

        Of what no other operation made: its values are arrays of their own. A whole B reads the first two.
        """
        known, parts = self._dag.ops[op], self._parts(group)
        own = known.residual_bytes
        kept = own if known.kept_bytes is None else known.kept_bytes
        if known.input_reads is not None and known.weight_reads is not None:
            late = known.weight_reads.values
            others = {*known.input_reads.values, *(name for name in late if not name.startswith("d "))}
            own, kept = own - self._global_bytes(others), kept - self._global_bytes(late)
        room = self.room(op, group)
        until_inputs, until_weights, crossing = (n // parts for n in (own - kept, kept, known.crossing_bytes))
        return math.ceil(until_inputs * room), math.ceil(until_weights * room), math.ceil(crossing * room)

    def room(self, op: str, group: str) -> float:
        """How much more than an equal share the buffers of experts that take rows have room for."""
        known = self._dag.ops[op]
        return 1 if known.row_bound is None else min(known.row_bound, self.axis_size(group, (known.shard_axis or "",)))

    def _global_bytes(self, values: Iterable[str]) -> int:
        return sum(self._dag.values[name].nbytes for name in values)

    def bucket_bytes(self, bucket: Bucket, group: str) -> int:
        """Bytes of the trainable leaves of ``bucket`` on one device, before any ZeRO sharding."""
        return sum(self.leaf_bytes(bucket, leaf, group) for leaf in bucket.leaves if leaf.kind == "trainable")

    def leaf_bytes(self, bucket: Bucket, leaf: Leaf, group: str) -> int:
        """Bytes of one whole leaf of ``bucket`` on one device."""
        return leaf.nbytes // self._expert_shards(bucket, group) // self._tensor_parts(leaf, group)

    def carried_bytes(self, bucket: Bucket, num_ops: int) -> int:
        """Bytes on one device of what its slices leave of carried state, beside the state itself.

        They are added up, floats in 32 bits at least; what is carried over microbatches takes the place of the state,
        the first of the copies of ``num_ops`` operations that each carry on what no batch changes.
        """
        if carry_of(bucket) == "equal":
            return (num_ops - 1) * sum(leaf.nbytes for leaf in bucket.leaves)
        if carry_of(bucket) not in ("sum", "mean"):
            return 0
        widened = (leaf.sum_dtype != leaf.dtype and math.prod(leaf.shape) * 4 for leaf in bucket.leaves)
        return sum(wide or leaf.nbytes for wide, leaf in zip(widened, bucket.leaves, strict=True))

    def accumulator_bytes(self, bucket: Bucket, group: str) -> tuple[int, int]:
        """Bytes of the accumulated gradients of ``bucket`` on one device, whole and as a shard: 32 bits at least."""
        experts, shards = self._expert_shards(bucket, group), self.zero_shards(bucket)
        whole = shard = 0
        for leaf in bucket.leaves:
            size = math.prod(leaf.shape)
            if leaf.kind == "trainable" and size:
                each = max(leaf.nbytes // size, 4)
                whole += size // experts // self._tensor_parts(leaf, group) * each
                shard += self._shard_length(leaf, experts * shards, group) * each
        return whole, shard

    def parameter_bytes(self, bucket: Bucket, group: str) -> int:
        """Bytes of all leaves of ``bucket`` that one device keeps between steps."""
        sharded = bucket.replication is not None and bucket.replication.shard_params
        trainable = self._shard_bytes(bucket, group, self.zero_shards(bucket) if sharded else 1)
        return trainable + sum(leaf.nbytes for leaf in bucket.leaves if leaf.kind != "trainable")

    def scattered_bytes(self, bucket: Bucket, group: str) -> int:
        """Bytes of the gradient of ``bucket`` on one device after a reduce_scatter."""
        return self._shard_bytes(bucket, group, self.zero_shards(bucket))

    def optimizer_bytes(self, bucket: Bucket, group: str) -> int:
        """Bytes of the optimizer state of ``bucket`` on one device; its shards are padded as the leaves are."""
        whole, shard = self.bucket_bytes(bucket, group), self._shard_bytes(bucket, group, self.zero_shards(bucket))
        return self.whole_optimizer_bytes(bucket, group) * shard // whole if whole else 0

    def whole_optimizer_bytes(self, bucket: Bucket, group: str) -> int:
        """Bytes of the optimizer state of ``bucket`` on one device where no ZeRO shards it."""
        trained = sum(leaf.nbytes for leaf in bucket.leaves if leaf.kind == "trainable")
        return bucket.optimizer_bytes * self.bucket_bytes(bucket, group) // trained if trained else 0

    def zero_shards(self, bucket: Bucket) -> int:
        """Over how many devices ZeRO divides what it shards of ``bucket``: all that hold copies; 1 without ZeRO."""
        owned = self._owned.get(bucket.name)
        return owned.num_shards if owned is not None else 1

    def _shard_bytes(self, bucket: Bucket, group: str, shards: int) -> int:
        """Bytes of the trainable leaves on one device when each is flattened, padded and divided."""
        experts = self._expert_shards(bucket, group)
        if shards == 1:
            return self.bucket_bytes(bucket, group)
        trained = (leaf for leaf in bucket.leaves if leaf.kind == "trainable" and math.prod(leaf.shape))
        return sum(
            leaf.nbytes // math.prod(leaf.shape) * self._shard_length(leaf, experts * shards, group) for leaf in trained
        )

    def _tensor_parts(self, leaf: Leaf, group: str) -> int:
        return 1 if leaf.tensor_dim is None else self.axis_size(group, ("tensor",))

    def _shard_length(self, leaf: Leaf, count: int, group: str) -> int:
        """Elements of a padded shard on one device: the tensor axis divides it too, where it can."""
        length, tensor = -(-math.prod(leaf.shape) // count), self.axis_size(group, ("tensor",))
        return length // tensor if length % tensor == 0 else length

    def _expert_shards(self, bucket: Bucket, group: str) -> int:
        return self.axis_size(group, tuple(self._shard_axes.get(bucket.name, ())))

    def _parts(self, group: str) -> int:
        return self._dag.num_microbatches * self.replicas(group)
