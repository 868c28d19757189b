"""Which physical device is which logical one: a placement, with what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from piper_jax.arguments import checked
from piper_jax.device_map.crossings import Crossing, Traffic
from piper_jax.device_map.packing import in_order, packed
from piper_jax.device_map.slices import nearest_slices, slice_fault
from piper_jax.device_map.units import units_of
from piper_jax.errors import PlanError, RuntimeFault
from piper_jax.ir.dag import Dag
from piper_jax.ir.nodes import DeviceGroup
from piper_jax.planning.completion import complete
from piper_jax.planning.plan import Plan
from piper_jax.simulation.hardware import HARDWARE, Hardware, hardware_profile
from piper_jax.topology import Layout, Topology, topology_of

FAMILY_PROFILE = {"nvlink": "h100", "ici": "v5p"}


@dataclass(frozen=True, kw_only=True)
class DeviceMap:
    """Logical devices of a plan on physical ones. The plan's groups stay logical. ``print`` shows it as a table.

    Attributes:
      dag: the completed plan.
      layout: the physical device of each logical one.
      hardware: the profile that prices communication.
      devices: what ``layout.topology`` describes, in its order, such as ``jax.devices()``; empty for a description.
    """

    dag: Dag = field(repr=False)
    layout: Layout
    hardware: Hardware = field(repr=False)
    devices: tuple[Any, ...] = field(default=(), repr=False)

    @classmethod
    @checked(RuntimeFault)
    def of(
        cls, plan: Plan | Dag, devices: Topology | Sequence[Any], *, hardware: str | Hardware | None = None
    ) -> DeviceMap:
        """The best placement that is known: tensor and expert in the fastest domain, then data, then pipeline.

        Of the placements by that rule and the devices as they come, the one whose communication takes least, where
        programs can be compiled for every group; on equal terms the devices as they come.

        Args:
          plan: placed and ordered.
          devices: a description, or JAX devices in any order; more than the plan needs may be given.
          hardware: prices the communication; by default the profile of the devices.

        Raises:
          RuntimeFault: too few devices.
        """
        given = cls.given(plan, devices, hardware=hardware)
        return cls(dag=given.dag, layout=given.best, hardware=given.hardware, devices=given.devices)

    @classmethod
    @checked(RuntimeFault)
    def given(
        cls, plan: Plan | Dag, devices: Topology | Sequence[Any], *, hardware: str | Hardware | None = None
    ) -> DeviceMap:
        """Logical device i is ``devices[i]``, whatever that costs; arguments as for :meth:`of`."""
        dag = complete(plan) if isinstance(plan, Dag) else plan.complete()
        topology = devices if isinstance(devices, Topology) else topology_of(devices)
        for group in dag.groups.values():
            if max(group.devices) >= len(topology.devices):
                raise RuntimeFault(
                    f"compile: group {group.name} needs logical device {max(group.devices)}; "
                    f"only {len(topology.devices)} are given.",
                    help="pass more devices, or lower data_parallel or pipeline_parallel; "
                    "planning and simulation need none.",
                )
        return cls(
            dag=dag,
            layout=Layout(topology=topology, physical=tuple(range(len(topology.devices)))),
            hardware=_profile(topology) if hardware is None else hardware_profile(hardware),
            devices=() if isinstance(devices, Topology) else tuple(devices),
        )

    @property
    def topology(self) -> Topology:
        """The physical devices."""
        return self.layout.topology

    @property
    def placed(self) -> tuple[Any, ...]:
        """``devices`` in logical order."""
        return tuple(self.devices[k] for k in self.layout.physical)

    @property
    def groups(self) -> tuple[DeviceGroup, ...]:
        """The plan's own groups, without those that join others."""
        return tuple(group for name, group in self.dag.groups.items() if "+" not in name)

    def physical(self, group: DeviceGroup) -> tuple[int, ...]:
        """Where a group lies: for each of its devices the index in ``topology.devices``."""
        return tuple(self.layout.physical[d] for d in group.devices)

    def groups_of(self, process: int) -> tuple[str, ...]:
        """The groups that a process has devices of: those that it will have to run."""
        return tuple(g.name for g in self.groups if process in self.topology.processes(self.physical(g)))

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """Communication over slower links than the fastest, and what it takes beyond the best placement known."""
        return () if self.topology.is_flat else self._traffic.crossings(self.layout, self.best)

    @property
    def excess_seconds(self) -> float:
        """What the communication of a step takes, one after another, beyond the best placement that is known."""
        return 0.0 if self.topology.is_flat else self._traffic.seconds(self.layout) - self._traffic.seconds(self.best)

    @cached_property
    def best(self) -> Layout:
        """The best placement known for the same devices, this one included."""
        if self.topology.is_flat:
            return self.layout
        units = units_of(self.dag.groups)
        others = [self._layout(rule(units, self.topology)) for rule in (packed, in_order)]
        return min((self.layout, *others), key=self._price)

    def require_slices(self) -> None:
        """Refuses a placement under which a group's programs cannot be compiled.

        Raises:
          PlanError: a group is no slice of a TPU; names the nearest that is.
        """
        for group in self.groups:
            if fault := slice_fault(self.topology, self.physical(group)):
                nearest = nearest_slices(self.topology, len(group.devices))
                given = slice_fault(self.topology, [self.best.physical[d] for d in group.devices])
                fix = (
                    f"the nearest slices are {nearest}."
                    if given
                    else f"DeviceMap.of(plan, devices) gives it {nearest}."
                )
                raise PlanError(
                    f"compile: group {group.name} on devices {_ids(self.physical(group))} is no slice of "
                    f"{self.topology.kind}.",
                    detail=(f"{fault}; a group is a box of whole hosts, or one inside a host.",),
                    help=fix,
                )

    def __str__(self) -> str:
        from piper_jax.device_map.text import map_text

        return map_text(self)

    @cached_property
    def _traffic(self) -> Traffic:
        return Traffic.of(self.dag, self.hardware)

    def _layout(self, placed: dict[int, int]) -> Layout:
        """A whole layout: ids that no group has get the devices that are left."""
        count = len(self.topology.devices)
        left = iter(sorted(set(range(count)) - set(placed.values())))
        physical = tuple(placed[d] if d in placed else next(left) for d in range(count))
        return Layout(topology=self.topology, physical=physical)

    def _price(self, layout: Layout) -> tuple[int, float]:
        """Groups that are no slices, then seconds; rounded, since sums in another order differ in their last digits."""
        faults = sum(
            bool(slice_fault(self.topology, [layout.physical[d] for d in group.devices])) for group in self.groups
        )
        return faults, float(f"{self._traffic.seconds(layout):.9g}")


def _profile(topology: Topology) -> Hardware:
    """That of the devices, or of the nearest kind that has one."""
    return HARDWARE.get(topology.kind) or HARDWARE[FAMILY_PROFILE.get(topology.levels[0], "cpu")]


def _ids(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
