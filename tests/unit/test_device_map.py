"""Placement: which devices lie in one block, what crosses slow links, what a TPU cannot be compiled for."""

from __future__ import annotations

import math
from dataclasses import replace
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_dags import chain

from piper_jax import DeviceMap, Plan, Strategy, Topology, simulate
from piper_jax.device_map.packing import in_order, packed
from piper_jax.device_map.slices import nearest_slices, slice_fault
from piper_jax.device_map.units import units_of
from piper_jax.errors import ConfigError, PlanError, RuntimeFault
from piper_jax.ir.nodes import DeviceGroup
from piper_jax.topology import topology_of

HOSTS = Topology.nested(("nvlink", 4), ("network", 2))
EVERY_OTHER = replace(HOSTS, devices=tuple(HOSTS.devices[k] for k in (0, 4, 1, 5, 2, 6, 3, 7)))


def planned(**degrees: int) -> Plan:
    return chain(degrees.get("pipeline_parallel", 1)).apply(Strategy(num_microbatches=4, **degrees))


def blocks(device_map: DeviceMap, name: str) -> set[tuple[int, ...]]:
    group = next(group for group in device_map.groups if group.name == name)
    return {device_map.topology.devices[k].blocks for k in device_map.physical(group)}


# -- descriptions -------------------------------------------------------------------------------------------
def test_topologies_print_their_blocks() -> None:
    assert str(HOSTS) == "8 devices of h100: 2 x nvlink of 4, network; 2 processes"
    pod = Topology.torus(4, 4, kind="v5e")
    assert str(pod) == "16 devices of v5e: 1 x ici of 16, dcn, a torus of 4x4; 4 processes"
    assert [pod.hops(0, k) for k in (1, 3, 5, 15)] == [1, 3, 2, 6]
    assert Topology.torus(4, 4, 4, kind="v5p").hops(0, 3) == 1  # around the ring


@pytest.mark.parametrize("make", [lambda: Topology.nested(("nvlink", 0)), lambda: Topology.torus(3, 2, kind="v5e")])
def test_wrong_descriptions_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="help: "):
        make()


def test_jax_devices_are_read_by_their_attributes() -> None:
    def device(k: int, **more: Any) -> Any:
        return SimpleNamespace(id=k, process_index=k // 2, **more)

    gpus = [device(k, platform="gpu", device_kind="NVIDIA H100 80GB HBM3", slice_index=k // 4) for k in range(8)]
    assert str(topology_of(gpus)) == "8 devices of h100: 2 x nvlink of 4, network; 4 processes"
    hosts = [device(k, platform="gpu", device_kind="NVIDIA A100-SXM4-80GB") for k in range(4)]
    assert str(topology_of(hosts)) == "4 devices of a100: 2 x nvlink of 2, network; 2 processes"
    chips = [
        SimpleNamespace(
            platform="tpu", device_kind="TPU v5 lite", process_index=0, coords=[k % 2 + 2, k // 2, 0], core_on_chip=0
        )
        for k in range(4)
    ]
    assert topology_of(chips) == Topology.torus(2, 2, kind="v5e")
    cpus = [device(k, platform="cpu", device_kind="cpu") for k in range(4)]
    assert not topology_of(cpus).is_flat  # two processes
    assert topology_of(cpus[:2]).is_flat


# -- placement by rule ----------------------------------------------------------------------------------------
def test_devices_that_are_all_alike_stay_in_order() -> None:
    flat = Topology.nested(("memory", 8), ("network", 1), kind="cpu")
    found = DeviceMap.of(planned(data_parallel=2, pipeline_parallel=4), flat)
    assert found.layout.physical == tuple(range(8))
    assert not found.crossings


def test_data_lies_inside_a_host_and_the_pipeline_across() -> None:
    plan = planned(data_parallel=4, pipeline_parallel=2)
    best, given = DeviceMap.of(plan, EVERY_OTHER), DeviceMap.given(plan, EVERY_OTHER)
    assert [blocks(best, name) for name in ("g0", "g1")] == [{(0,)}, {(1,)}]
    assert {crossing.what for crossing in best.crossings} == {"send"}
    assert best.excess_seconds == 0
    assert [blocks(given, name) for name in ("g0", "g1")] == [{(0,), (1,)}] * 2
    assert given.best == best.layout
    assert given.excess_seconds > 0
    assert {crossing.what for crossing in given.crossings} == {"all_reduce over data"}
    assert all(c.level == "network" and c.best_level == "nvlink" for c in given.crossings)


def test_a_group_too_large_for_a_host_is_divided_between_tensor_sets() -> None:
    """Also where its axes are declared the other way around."""
    for axes in ((("data", 2), ("tensor", 4)), (("tensor", 4), ("data", 2))):
        group = DeviceGroup(name="g0", devices=tuple(range(8)), axes=axes)
        placed = packed(units_of({"g0": group}), EVERY_OTHER)
        stride = 1 if axes[-1][0] == "tensor" else 2
        first = range(4) if stride == 1 else range(0, 8, 2)
        assert len({EVERY_OTHER.devices[placed[d]].blocks for d in first}) == 1


def test_no_more_groups_are_divided_than_must_be() -> None:
    plan = planned(data_parallel=6, pipeline_parallel=4)
    found = DeviceMap.of(plan, Topology.nested(("nvlink", 8), ("network", 3)))
    assert sorted(len(blocks(found, f"g{k}")) for k in range(4)) == [1, 1, 1, 3]


def test_a_map_knows_which_groups_a_process_runs() -> None:
    plan = planned(data_parallel=2, pipeline_parallel=4)
    found = DeviceMap.of(plan, EVERY_OTHER)
    assert [found.groups_of(process) for process in (0, 1)] == [("g0", "g1"), ("g2", "g3")]


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(RuntimeFault, match="g1 needs logical device 9; only 8 are given"):
        DeviceMap.of(planned(data_parallel=5, pipeline_parallel=2), HOSTS)


def test_the_simulator_takes_the_links_of_a_map() -> None:
    plan = planned(data_parallel=4)
    maps = DeviceMap.of(plan, EVERY_OTHER), DeviceMap.given(plan, EVERY_OTHER)
    best, given = (simulate(plan, hardware="h100", devices=found) for found in maps)
    assert best.makespan < given.makespan
    with pytest.raises(ConfigError, match="devices lie on hardware"):
        simulate(plan, devices=maps[0])


@settings(max_examples=60, deadline=None)
@given(
    domains=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    axes=st.lists(st.tuples(*[st.integers(1, 3)] * 3), min_size=1, max_size=4),
    spare=st.integers(0, 3),
    shuffled=st.randoms(use_true_random=False),
)
def test_every_logical_device_gets_a_device_of_its_own(domains: Any, axes: Any, spare: int, shuffled: Any) -> None:
    groups, start = {}, 0
    for k, sizes in enumerate(axes):
        devices = tuple(range(start, start := start + math.prod(sizes)))
        named = tuple(zip(("data", "expert", "tensor"), sizes, strict=True))
        groups[f"g{k}"] = DeviceGroup(name=f"g{k}", devices=devices, axes=named)
    outer = -(-(start + spare) // math.prod(domains))
    names = [(f"level{k}", size) for k, size in enumerate((*domains, outer))]
    topology = Topology.nested(*names)
    topology = replace(topology, devices=tuple(shuffled.sample(topology.devices, len(topology.devices))))
    for rule in (packed, in_order):
        placed = rule(units_of(groups), topology)
        assert set(placed) == set(range(start))
        assert len(set(placed.values())) == start


# -- TPU slices -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("topology", "box"),
    [
        (Topology.torus(4, 4, kind="v5e"), "2x2"),
        (Topology.torus(2, 2, 4, kind="v5p"), "2x2x1"),
        (Topology.torus(2, 2, 2, kind="tpu7x", cores=2), "2x1x1"),
        (Topology.torus(4, 2, kind="v5e", slices=2), "2x2"),
    ],
)
def test_groups_are_boxes_that_can_be_compiled_for(topology: Topology, box: str) -> None:
    found = DeviceMap.of(planned(data_parallel=4, pipeline_parallel=4), topology)
    found.require_slices()
    assert str(found).count(f"ici, {box} chips from") == 4
    assert all(len(topology.processes(found.physical(group))) == 1 for group in found.groups)


def test_a_group_that_is_no_slice_is_refused_with_the_nearest() -> None:
    pod = Topology.torus(4, 4, kind="v5e")
    with pytest.raises(PlanError) as caught:
        DeviceMap.given(planned(data_parallel=4, pipeline_parallel=4), pod).require_slices()
    assert str(caught.value) == dedent("""\
        compile: group g0 on devices 0, 1, 2, 3 is no slice of v5e.
            its box of 4x1 chips cuts through hosts of 2x2; a group is a box of whole hosts, or one inside a host.
        help: DeviceMap.of(plan, devices) gives it 2x2 chips (4 devices).""")
    with pytest.raises(PlanError, match=r"the nearest slices are 1x2 chips \(2 devices\) or 2x2 chips \(4 devices\)"):
        DeviceMap.of(planned(data_parallel=3, pipeline_parallel=4), pod).require_slices()


def test_what_is_a_slice() -> None:
    pod = Topology.torus(4, 4, kind="v5e")
    for indices in ([0], [15], [0, 1], [0, 4], [0, 1, 4, 5], list(range(8)), list(range(16))):
        assert not slice_fault(pod, indices)
    for indices, part in (([0, 5], "no box"), ([0, 2], "no box"), ([1, 2], "cuts through"), ([5, 6, 9, 10], "hosts")):
        assert part in slice_fault(pod, indices)
    halves = Topology.torus(2, 2, 1, kind="tpu7x", cores=2)
    assert "parts of chips" in slice_fault(halves, [1, 2])
    assert nearest_slices(halves, 4) == "1x2x1 chips (4 devices)"


def test_hops_in_a_torus_cost_bandwidth() -> None:
    """Groups that take every other chip of a line share its links."""
    line = Topology.torus(4, 1, kind="v5e", host=(4, 1))
    plan = planned(data_parallel=2, pipeline_parallel=2)
    apart = DeviceMap.given(plan, replace(line, devices=tuple(line.devices[k] for k in (0, 2, 1, 3))))
    rows = {crossing.what: crossing for crossing in apart.crossings}
    assert rows["all_reduce over data"].hops == 2
    assert rows["all_reduce over data"].seconds == 2 * rows["all_reduce over data"].best_seconds


# -- text -------------------------------------------------------------------------------------------------------
def test_a_map_prints_where_groups_lie_and_what_it_costs() -> None:
    assert str(DeviceMap.given(planned(data_parallel=4), EVERY_OTHER)) == dedent("""\
        devices  8 devices of h100: 2 x nvlink of 4, network; 2 processes

        group  axes    on devices  processes  within
        g0     data=4  0-3         0-1        network

        communication         between  over     runs  bytes a step  time a step      best  by the best over
        all_reduce over data  g0       network     1      4.00 KiB     56.06 us  13.61 us  nvlink

        42.45 us a step more than under DeviceMap.of(plan, devices) (by the profile h100, each alone)""")
