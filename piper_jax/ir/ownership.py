"""Who owns each state bucket, and over which axes its gradients are reduced."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from piper_jax.errors import PlanError
from piper_jax.ir.dag import Dag
from piper_jax.ir.device_groups import axes_of, axis_size, joint_group
from piper_jax.ir.nodes import Compute, DeviceGroup, Replication


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """A state bucket on its owners.

    Attributes:
      owners: groups whose compute nodes read it, in group order.
      group: the owner, or the joint group of several.
      axes: axes of ``group`` over which copies of the bucket lie: reduced, or sharded under ZeRO.
      num_copies: devices along ``axes``; 1 means that nothing is to be reduced, as where all leaves are empty.
      num_parts: over how many devices of each owner its experts are divided, each of which has others.
      replication: as directed; without a directive the bucket is whole on each owner.
      elementwise: as for the bucket.
    """

    bucket: str
    owners: tuple[str, ...]
    group: DeviceGroup
    axes: tuple[str, ...]
    num_copies: int
    num_parts: int
    replication: Replication
    elementwise: bool

    @property
    def num_shards(self) -> int:
        """Over how many devices ZeRO divides what it shards; 1 without it."""
        return self.num_copies if self.replication.shard_optimizer else 1

    @property
    def is_divided(self) -> bool:
        """Whether devices hold different parts of its gradients or optimizer state when they update it."""
        return self.num_parts > 1 or (self.num_shards > 1 and self.elementwise)

    @property
    def span(self) -> int | None:
        """After how many microbatches gradients are reduced to their shard; None for once per step.

        What several groups own is reduced once per step: its owners take their microbatches at different times.
        """
        every = self.replication.reduce_every
        if every == "step" or self.num_shards == 1 or len(self.owners) > 1:
            return None
        return 1 if every == "microbatch" else every


def owners_of(dag: Dag) -> dict[str, tuple[str, ...]]:
    """The owner groups of every bucket, in group order; state that nothing reads lies on the first group."""
    groups_of_op: dict[str, set[str]] = {}
    for name, node in dag.nodes.items():
        if isinstance(node, Compute) and node.group is not None:
            groups_of_op.setdefault(name.op, set()).add(node.group)
    owners: dict[str, set[str]] = {bucket: set() for bucket in dag.buckets}
    for op in dag.ops.values():
        for bucket in op.reads:
            owners.setdefault(bucket, set()).update(groups_of_op.get(op.name, ()))
    placed = set[str]().union(*groups_of_op.values())
    in_order = tuple(group for group in dag.groups if group in placed)
    return {
        bucket: tuple(group for group in in_order if group in found) or in_order[:1] for bucket, found in owners.items()
    }


def shard_axes_of(dag: Dag) -> dict[str, frozenset[str]]:
    """For each bucket the axes over which operations that read it are sharded."""
    found: dict[str, set[str]] = {}
    for op in dag.ops.values():
        for bucket in op.reads:
            found.setdefault(bucket, set()).update((op.shard_axis,) if op.shard_axis else ())
    return {bucket: frozenset(axes) for bucket, axes in found.items()}


def ownerships(dag: Dag) -> dict[str, Ownership]:
    """Owners and reduction axes of every trainable bucket, in bucket order; computed once."""
    known = dag.memo.get("ownerships")
    if known is None:
        known = dag.memo["ownerships"] = _ownerships(dag)
    return known


def _ownerships(dag: Dag) -> dict[str, Ownership]:
    owners, sharded = owners_of(dag), shard_axes_of(dag)
    return {
        name: ownership(dag, name, owners[name], sharded.get(name, frozenset()), bucket.replication)
        for name, bucket in dag.buckets.items()
        if owners[name] and any(leaf.kind == "trainable" for leaf in bucket.leaves)
    }


def ownership(
    dag: Dag, name: str, owners: tuple[str, ...], sharded: frozenset[str], replication: Replication | None
) -> Ownership:
    """A bucket on its owners.

    Args:
      sharded: axes over which what reads it is sharded.
    """
    replication = replication or Replication(axes=())
    groups = [dag.groups[owner] for owner in owners]
    group = joint_group(groups)
    wanted = tuple(axis for axis in replication.axes if axis not in sharded)
    sizes: Mapping[str, int] = dict(axes_of(group))
    axes = tuple(axis for axis in wanted if sizes.get(axis, 1) > 1)
    if len(groups) > 1:
        axes = ("owner", *axes)
        if len({axes_of(g) for g in groups}) > 1:
            _require_whole(name, groups, wanted)
    if not any(math.prod(leaf.shape) for leaf in dag.buckets[name].leaves):
        axes = ()
    num_copies = axis_size(group, axes)
    return Ownership(
        bucket=name, owners=owners, group=group, axes=axes, num_copies=num_copies,
        num_parts=axis_size(groups[0], sharded), replication=replication,
        elementwise=dag.buckets[name].elementwise,
    )  # fmt: skip


def _require_whole(name: str, groups: list[DeviceGroup], wanted: tuple[str, ...]) -> None:
    """Owners of different shapes are joined flat, which is right only if each device of each holds a whole copy."""
    for group in groups:
        if axis_size(group, wanted) != len(group.devices):
            raise PlanError(
                f"state {name} is used on groups of different shapes, and {group.name} does not hold whole copies.",
                detail=(f"{g.name}: " + " x ".join(f"{axis}={n}" for axis, n in axes_of(g)) for g in groups),
                help="give these groups equal axes, or replicate the state over all axes of each.",
            )
