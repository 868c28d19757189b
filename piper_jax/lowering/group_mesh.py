"""Device groups as meshes, and arrays that move between a group's mesh and a joint one without a copy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from piper_jax.errors import PlanError, RuntimeFault
from piper_jax.ir.device_groups import REPLICA_AXES
from piper_jax.ir.nodes import DeviceGroup
from piper_jax.lowering.keys import Layout

TENSOR = "tensor"
AXES = (*REPLICA_AXES, TENSOR)
OWNER = "owner"
JOINT_AXES = (OWNER, *REPLICA_AXES)
SLICE = "slice"  # not of a mesh: the replicas that one device has, where a group has fewer devices than others
PARTITION: dict[Layout, P] = {
    "replicated": P(), "stacked": P(REPLICA_AXES), "batch": P(None, REPLICA_AXES), "experts": P("expert"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GroupMesh:
    """The mesh of one device group, with the shardings that its arrays have."""

    name: str
    mesh: Mesh
    shardings: dict[Layout, NamedSharding]

    @property
    def devices(self) -> tuple[Any, ...]:
        return tuple(self.mesh.devices.flat)

    @cached_property
    def processes(self) -> frozenset[int]:
        """The processes that drive its devices."""
        return frozenset(d.process_index for d in self.devices)

    @property
    def replicas(self) -> int:
        return math.prod(self.mesh.shape[a] for a in REPLICA_AXES)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.mesh.devices.shape

    @property
    def tensor(self) -> int:
        return self.mesh.shape[TENSOR]


def group_mesh(group: DeviceGroup, devices: Sequence[Any]) -> GroupMesh:
    """The mesh of ``group`` over physical ``devices``, indexed by logical id.

    Raises:
      RuntimeFault: too few devices.  PlanError: an axis of unknown name.
    """
    if max(group.devices) >= len(devices):
        raise RuntimeFault(
            f"compile: group {group.name} needs logical device {max(group.devices)}; only {len(devices)} are given.",
            help="pass more devices, or lower data_parallel or pipeline_parallel; planning and simulation need none.",
        )
    sizes = dict(group.axes) or {"data": len(group.devices)}
    if unknown := set(sizes) - set(AXES):
        raise PlanError(
            f"compile: group {group.name} has axes {sorted(unknown)}.", help=f"legal axes: {', '.join(AXES)}."
        )
    shape = [sizes.get(axis, 1) for axis in AXES]
    array = np.array([devices[i] for i in group.devices], dtype=object).reshape(shape)
    mesh = Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return GroupMesh(
        name=group.name, mesh=mesh, shardings={layout: NamedSharding(mesh, spec) for layout, spec in PARTITION.items()}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JointMesh:
    """Several groups of equal shape side by side: one more axis, ``owner``."""

    members: tuple[GroupMesh, ...]
    mesh: Mesh

    @staticmethod
    def stacked(own: P) -> P:
        """The partition of stacked arrays of the members, in order, from that of one of them."""
        return P(JOINT_AXES, *own[1:])

    def join(self, arrays: Sequence[jax.Array], own: P, rows: int) -> jax.Array:
        """Stacked arrays of the members of this process, in order, as one of ``rows`` rows; no data moves."""
        shape = (rows, *arrays[0].shape[1:])
        return assembled(by_device(*arrays), shape, NamedSharding(self.mesh, self.stacked(own)))

    def split(self, array: jax.Array, own: Sequence[NamedSharding], *, stacked: bool) -> list[jax.Array]:
        """An array of the joint mesh, replicated or stacked, as one for each member of this process; no data moves.

        Args:
          own: the sharding of each member's array.
        """
        shards = by_device(array)
        return [
            assembled(shards, (m.replicas, *array.shape[1:]) if stacked else array.shape, sharding)
            for m, sharding in zip(self.members, own, strict=True)
            if any(d in shards for d in m.devices)
        ]


def by_device(*arrays: jax.Array) -> dict[Any, jax.Array]:
    """What each device of this process has of arrays that lie on different ones."""
    return {s.device: s.data for a in arrays for s in a.addressable_shards}


def assembled(shards: Mapping[Any, jax.Array], shape: Sequence[int], sharding: NamedSharding) -> jax.Array:
    """The shards on the devices of ``sharding``, as one array; no data moves."""
    own = [shards[d] for d in sharding.mesh.devices.flat if d in shards]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, own)


def joint_mesh(members: Sequence[GroupMesh]) -> JointMesh:
    """The joint mesh of ``members``; those of different shapes lie side by side along the axis of owners."""
    if len({m.mesh.devices.shape for m in members}) > 1:
        array = np.array([d for m in members for d in m.devices], dtype=object).reshape(-1, 1, 1, 1)
    else:
        array = np.stack([m.mesh.devices for m in members])
    axes = (OWNER, *AXES)
    mesh = Mesh(array, axes, axis_types=(AxisType.Auto,) * len(axes))
    return JointMesh(members=tuple(members), mesh=mesh)
