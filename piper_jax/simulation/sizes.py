"""Sizes on one device: how microbatches, replicas and shards divide the global arrays of a plan."""

from __future__ import annotations

import math

from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import Bucket, Value

REPLICA_AXES = ("data", "expert")


class Sizes:
    """Answers, for one plan, how many bytes of a value or of state one device of a group holds.

    A value with a batch dim is divided by the microbatches and by the replicas (axes data and expert) of the group; one
    without is whole on every device. State of expert regions is divided over the axis of its shard directive.
    """

    def __init__(self, dag: Dag):
        self._dag = dag
        self._axes = {
            name: dict(group.axes) if group.axes else {"data": len(group.devices)} for name, group in dag.groups.items()
        }
        self._shard_axes = {
            bucket: op.shard_axis for op in dag.ops.values() if op.shard_axis is not None for bucket in op.reads
        }

    def axis_size(self, group: str, axes: tuple[str, ...]) -> int:
        """Product of the named axes of ``group``; axes it lacks count as 1."""
        sizes = self._axes.get(group, {})
        return math.prod(sizes.get(axis, 1) for axis in axes)

    def replicas(self, group: str) -> int:
        """Into how many parts the group divides each microbatch."""
        return self.axis_size(group, REPLICA_AXES)

    def num_devices(self, group: str) -> int:
        """Devices of ``group``, at least 1."""
        found = self._dag.groups.get(group)
        return max(1, len(found.devices)) if found else 1

    def value_bytes(self, name: str, group: str) -> int:
        """Bytes on one device of ``group`` for one microbatch of the value ``name``; 0 if its size is unknown.

        ``gradient``, ``parameters`` and ``state`` of a bucket, and ``residuals`` of an op, are sized from those tables.
        """
        prefix, _, rest = name.partition(" ")
        if prefix in ("gradient", "parameters", "state") and rest in self._dag.buckets:
            bucket = self._dag.buckets[rest]
            return self.optimizer_bytes(bucket, group) if prefix == "state" else self.bucket_bytes(bucket, group)
        value = self._dag.values.get(name)
        if value is not None and value.nbytes:
            return self._slice_bytes(value, group)
        if prefix == "residuals" and rest in self._dag.ops:
            return self._dag.ops[rest].residual_bytes // (self._dag.num_microbatches * self.replicas(group))
        return 0

    def bucket_bytes(self, bucket: Bucket, group: str) -> int:
        """Bytes of the trainable leaves of ``bucket`` on one device, before any ZeRO sharding."""
        return sum(leaf.nbytes for leaf in bucket.leaves if leaf.kind == "trainable") // self._expert_shards(
            bucket, group
        )

    def parameter_bytes(self, bucket: Bucket, group: str) -> int:
        """Bytes of all leaves of ``bucket`` that one device keeps between steps."""
        shards = self._expert_shards(bucket, group)
        zero = self.zero_shards(bucket, group) if bucket.replication and bucket.replication.shard_params else 1
        return sum(leaf.nbytes // (shards * zero if leaf.kind == "trainable" else 1) for leaf in bucket.leaves)

    def gradient_shards(self, bucket: Bucket, group: str) -> int:
        """Into how many parts the reduced gradient of ``bucket`` is divided."""
        return self.zero_shards(bucket, group) if bucket.replication and bucket.replication.shard_grads else 1

    def optimizer_bytes(self, bucket: Bucket, group: str) -> int:
        """Bytes of the optimizer state of ``bucket`` on one device."""
        zero = self.zero_shards(bucket, group) if bucket.replication and bucket.replication.shard_optimizer else 1
        return bucket.optimizer_bytes // (self._expert_shards(bucket, group) * zero)

    def zero_shards(self, bucket: Bucket, group: str) -> int:
        """Product of the axes over which ``bucket`` is replicated."""
        return self.axis_size(group, bucket.replication.axes) if bucket.replication else 1

    def _expert_shards(self, bucket: Bucket, group: str) -> int:
        axis = self._shard_axes.get(bucket.name)
        return self.axis_size(group, (axis,)) if axis else 1

    def _slice_bytes(self, value: Value, group: str) -> int:
        divided = value.batch_dim is not None
        return value.nbytes // (self._dag.num_microbatches * self.replicas(group)) if divided else value.nbytes
