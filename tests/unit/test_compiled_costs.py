"""Reports of compiled programs as costs of the simulator; no compiler is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from traced_dags import chain

from piper_jax import Plan, Strategy, simulate
from piper_jax.errors import ConfigError
from piper_jax.ir.nodes import Collective, Compute, Send, Update
from piper_jax.simulation import HARDWARE
from piper_jax.targets.costs import compiled_costs, program_seconds
from piper_jax.targets.mapping import map_onto
from piper_jax.targets.overlap import CollectiveUse, Work
from piper_jax.targets.profiles import parse_target
from piper_jax.targets.report import ProgramReport, TargetReport

H100, V5E = HARDWARE["h100"], HARDWARE["v5e"]
GPU, TPU = parse_target("gpu:h100:1x8"), parse_target("tpu:v5e:2x4")


def work(**fields: Any) -> Work:
    given: dict[str, Any] = {"has_product": False, "flops": 0, "dtype": "bfloat16", "num_bytes": 0, "cycles": 0}
    return Work(**{**given, **fields})


def program(**fields: Any) -> ProgramReport:
    given: dict[str, Any] = {
        "label": "F0 g0", "role": "compute", "groups": ("g0",), "num_runs": 1, "nodes": ((),), "argument_bytes": 0,
        "output_bytes": 0, "alias_bytes": 0, "temporary_bytes": 0, "flops": 0.0, "accessed_bytes": 0.0, "work": (),
        "collectives": (), "is_alone": False,
    }  # fmt: skip
    return ProgramReport(**{**given, **fields})


def gather(*beside: Work) -> CollectiveUse:
    return CollectiveUse(
        name="all-gather", kind="all-gather", num_bytes=10**9, group_size=8, is_asynchronous=True, beside=beside
    )


PRODUCT, COPY = work(has_product=True, flops=10**12), work(num_bytes=10**9)


def test_an_instruction_takes_the_longer_of_arithmetic_and_traffic() -> None:
    expected = 1e12 / 989e12 + 1e9 / 3.35e12
    assert program_seconds(program(work=(PRODUCT, COPY), flops=1e12), GPU, H100) == pytest.approx(expected)
    assert program_seconds(program(work=(COPY,), flops=4e12), GPU, H100) == pytest.approx(4e12 / 989e12)
    assert program_seconds(program(accessed_bytes=3.35e9), GPU, H100) == pytest.approx(1e-3)
    assert program_seconds(program(), GPU, H100) == H100.launch_seconds


def test_of_a_collective_only_what_is_not_covered_is_added() -> None:
    alone = gather().seconds(H100)
    assert program_seconds(program(collectives=(gather(),)), GPU, H100) == pytest.approx(alone)
    little, much = (replace(PRODUCT, flops=flops) for flops in (10**11, 10**13))
    partly = program(work=(little, COPY), collectives=(gather(little),))
    assert program_seconds(partly, GPU, H100) == pytest.approx(alone + COPY.seconds(H100))
    wholly = program(work=(much, COPY), collectives=(gather(much),))
    assert program_seconds(wholly, GPU, H100) == pytest.approx(much.seconds(H100) + COPY.seconds(H100))


def test_cycles_count_where_the_compiler_gives_them() -> None:
    counted = program(work=(work(cycles=1_500_000, flops=1), work(cycles=500_000)), flops=1e15)
    assert program_seconds(counted, TPU, V5E) == pytest.approx(2e6 * 131072 / 197e12)


def compiled(plan: Plan, target: str, taken: dict[str, float]) -> TargetReport:
    """A report in which the nodes of each pass are runs of one program that takes so many seconds of arithmetic."""
    placed = map_onto(plan, target)
    programs = [
        program(
            label=name,
            nodes=tuple((n.id,) for n in placed.dag.nodes.values() if name == pass_of(n)),
            flops=seconds * 989e12,
            work=(PRODUCT,),
        )
        for name, seconds in taken.items()
    ]
    return TargetReport(
        target=parse_target(target), num_devices=4, device_map=placed, options={}, programs=(*programs, program()),
        num_transfers=0, seconds=0.0,
    )  # fmt: skip


def pass_of(node: object) -> str:
    return "U" if isinstance(node, Update) else node.id.PASS or "" if isinstance(node, Compute) else ""


def test_programs_give_their_nodes_costs_and_transfers_take_the_network() -> None:
    plan, taken = chain(2).apply(Strategy(pipeline_parallel=2, data_parallel=2)), {"F": 1.0, "B": 2.0, "U": 0.5}
    costs = compiled_costs(compiled(plan, "gpu:h100:2x2", taken))
    assert costs.outside_seconds == H100.launch_seconds  # a program of no node
    price = costs.bind(plan.complete())
    for node in plan.complete().nodes.values():
        found = price(node).duration
        match node:
            case Send():
                assert found == pytest.approx(14e-6, rel=1e-2)  # groups lie on two hosts
            case Collective():
                assert found == 0
            case _:
                assert found == pytest.approx(taken.get(pass_of(node), 0.0))
    report = simulate(plan, costs=costs)
    assert report.costs == "compiled gpu:h100:2x2"
    assert report.makespan == pytest.approx(4 * 3 + 3 + 0.5, rel=1e-3)


def test_a_collective_crosses_what_the_map_has_between_its_devices() -> None:
    plan = chain(1).apply(Strategy(data_parallel=8))
    one, two = (
        compiled_costs(replace(compiled(plan, target, {}), programs=(program(collectives=(gather(),)),)))
        for target in ("gpu:h100:1x8", "gpu:h100:2x4")
    )
    assert one.outside_seconds == pytest.approx(gather().seconds(H100))
    assert two.outside_seconds == pytest.approx(gather().seconds(H100, H100.levels[1]))


def test_a_chip_without_a_profile_needs_one() -> None:
    report = compiled(chain(2).apply(Strategy(pipeline_parallel=2)), "gpu:b200:1x2", {"F": 1.0})
    with pytest.raises(ConfigError, match="hardware 'b200' has no profile"):
        compiled_costs(report)
    assert compiled_costs(report, "h200").seconds
