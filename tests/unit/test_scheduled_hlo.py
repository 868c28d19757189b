"""Reading XLA's schedule, on short texts as the compilers for H100 (XLA of jax 0.10.2) and TPU v5p write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from piper_jax.simulation.hardware import HARDWARE
from piper_jax.targets.overlap import CollectiveUse, collective_uses
from piper_jax.targets.scheduled_hlo import Array, Module

TEXTS = Path(__file__).parent / "hlo"


def module(name: str) -> Module:
    return Module.parse((TEXTS / f"{name}.txt").read_text(encoding="utf-8"))


def uses(name: str) -> tuple[CollectiveUse, ...]:
    return collective_uses(module(name))


def test_a_gather_and_a_reduction_beside_products() -> None:
    gather, scatter = uses("h100_gather_and_scatter")
    assert (gather.kind, gather.num_bytes, gather.group_size) == ("all-gather", 32 << 20, 8)
    assert (scatter.kind, scatter.num_bytes, scatter.group_size) == ("reduce-scatter", 32 << 20, 8)
    assert gather.is_asynchronous
    assert gather.text() == "1 matrix product, 1 other"
    assert scatter.text() == "1 matrix product, 1 other"


def test_a_pair_that_xla_marks_synchronous_is_exposed() -> None:
    (use,) = uses("h100_synchronous")
    assert not use.is_asynchronous
    assert not use.is_hidden
    assert use.text() == "nothing"


def test_what_works_on_scalars_hides_nothing() -> None:
    (use,) = uses("h100_beside_a_scalar")
    assert use.is_asynchronous
    assert not use.is_hidden


def test_wrapped_collectives_updates_libraries_and_loops() -> None:
    inner, wrapped = uses("generic_async_and_loop")
    assert (wrapped.kind, wrapped.num_bytes, wrapped.group_size) == ("all-to-all", 4 << 20, 4)
    assert wrapped.text() == "2 matrix products"
    assert (inner.kind, inner.is_asynchronous, inner.group_size) == ("all-reduce", False, 2)


def test_tpu_texts_have_layouts_with_tiles_and_cycles() -> None:
    gather, reduction, permute = uses("v5p_layouts_and_cycles")
    assert (gather.kind, gather.is_asynchronous, gather.num_bytes) == ("all-gather", False, 32 << 20)
    assert (reduction.kind, reduction.is_asynchronous) == ("all-reduce", False)
    assert permute.is_asynchronous
    assert permute.text() == "1 matrix product, 1 other, 334134 cycles"


def test_a_gather_that_is_a_chain_of_fusions_is_one_collective() -> None:
    (use,) = uses("v5e_chain_of_fusions")
    assert (use.kind, use.num_bytes, use.group_size) == ("all-gather", 16 << 20, 4)
    assert use.is_asynchronous
    assert use.text() == "1 matrix product, 300000 cycles"


def test_flops_are_those_of_the_matrix_products() -> None:
    found = module("h100_gather_and_scatter")
    assert [p.flops for p in found.products_of(found.entry)] == [2 * 4096 * 1024 * 4096] * 2
    assert {p.dtype for p in found.products_of(found.entry)} == {"bf16"}
    loop = module("generic_async_and_loop")
    assert [p.flops for p in loop.products_of(loop.entry)] == [2 * 64**3, 2 * 1024**3, 3 * 2 * 8**3]


def test_the_cover_compares_peak_rates() -> None:
    gather, _ = uses("h100_gather_and_scatter")
    h100 = HARDWARE["h100"]
    product = max(2 * 4096 * 1024 * 4096 / 989e12, (2 * 4096 * 1024 + 4 * 1024 * 4096 + 2 * 4096 * 4096) / 3.35e12)
    other = 2 * 2 * 4096 * 4096 / 3.35e12
    collective = 7 / 8 * (32 << 20) / 450e9 + 3 * 3.4e-6
    assert gather.seconds(h100) == pytest.approx(collective)
    assert gather.cover(h100) == pytest.approx((product + other) / collective)


@pytest.mark.parametrize(
    ("array", "nbytes"),
    [(Array("pred", (8,)), 8), (Array("bf16", (2, 3)), 12), (Array("f8e4m3fn", (5,)), 5), (Array("f64", ()), 8)],
    ids=str,
)
def test_bytes_of_arrays(array: Array, nbytes: int) -> None:
    assert array.nbytes == nbytes
