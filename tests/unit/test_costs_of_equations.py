"""FLOPs of equations: what each primitive counts, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from piper_jax.tracing.costs import jaxpr_flops

ROWS, WIDTH, HIDDEN, EXPERTS = 24, 16, 32, 4


def flops(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> int:
    return jaxpr_flops(jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).jaxpr)


def backward(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> list[int]:
    """FLOPs of the products and convolutions that are no part of the forward, one by one."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    both = jax.make_jaxpr(jax.grad(lambda *a: fn(*a).sum(), tuple(range(len(shapes)))))(*arrays).jaxpr
    products = [e for e in both.eqns if e.primitive.name in ("ragged_dot_general", "conv_general_dilated")]
    return [jaxpr_flops(type("One", (), {"eqns": [e]})) for e in products[1:]]


def experts(rows: Any, weights: Any) -> Any:
    return lax.ragged_dot(rows, weights, jnp.array([2, 10, 4, 8], jnp.int32))


def test_a_ragged_product_counts_each_row_once_forward_and_backward() -> None:
    shapes = (ROWS, WIDTH), (EXPERTS, WIDTH, HIDDEN)
    each = 2 * ROWS * WIDTH * HIDDEN
    assert flops(experts, *shapes) == each
    assert backward(experts, *shapes) == [each, each]  # rows ragged in the free, then in the contracted dimension


def test_a_ragged_batch_counts_as_a_batched_product() -> None:
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((2,), (1,)), ((0,), (0,))), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    ragged = lambda a, b: lax.ragged_dot_general(a, b, jnp.array([1, 2], jnp.int32), numbers)  # noqa: E731
    assert flops(ragged, (3, 5, 7), (3, 7, 11)) == flops(jnp.matmul, (3, 5, 7), (3, 7, 11)) == 2 * 3 * 5 * 7 * 11


@pytest.mark.parametrize(
    ("options", "kernel", "pairs"),
    [
        ({}, (3, 3, 6, 8), 6 * 8 * 22 * 22),  # 3 x 8 positions, two of them on the padding
        ({"window_strides": (2, 2)}, (3, 3, 6, 8), 6 * 8 * 11 * 11),
        ({"feature_group_count": 6}, (3, 3, 1, 12), 1 * 12 * 22 * 22),
    ],
)
def test_a_convolution_counts_neither_padding_nor_holes(options: Any, kernel: Any, pairs: int) -> None:
    """Gradients of inputs (holes in the cotangent) and of weights (a window with steps) cost what the forward does."""
    chosen = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **options}
    convolve = lambda x, w: lax.conv_general_dilated(x, w, **chosen)  # noqa: E731
    shapes = (2, 8, 8, 6), kernel
    assert flops(convolve, *shapes) == 2 * 2 * pairs
    assert backward(convolve, *shapes) == [2 * 2 * pairs] * 2


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), [(3, 4, 5), (3, 5, 6)], 2 * 3 * 4 * 5 * 6),
        (lambda x: lax.cumsum(x, axis=1), [(4, 8)], 32),
        (lambda x: lax.reduce_sum(x, axes=(0, 1)), [(4, 8)], 32),
        (lambda x: lax.sort(x, dimension=1), [(4, 8)], 32 * 3),
        (lambda x: lax.top_k(x, 4)[0], [(4, 64)], 256 * 3),
        (lambda x: lax.reduce_precision(x, 8, 7), [(4, 8)], 0),
        (lambda x, u: x.at[jnp.array([1, 2])].add(u), [(1000, 8), (2, 8)], 2 * 8 + 4),  # and the two indices
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (2, 2), "VALID"), [(8, 8)], 64),
        (
            lambda x: lax.linalg.cholesky(x, symmetrize_input=False),
            [(2, 9, 9)],
            2 * 9**3 // 3 + 2 * 81,
        ),  # and the triangle that is kept
        (lambda x: lax.fft(x, "RFFT", (16,)), [(3, 16)], 5 * 48 * 4 // 2),
        (lambda x: lax.scan(lambda c, y: (c * y, None), x[0], x)[0], [(6, 4)], 6 * 4),
    ],
)
def test_other_primitives(fn: Callable[..., Any], shapes: list[tuple[int, ...]], expected: int) -> None:
    assert flops(fn, *shapes) == expected


def test_a_kernel_counts_at_each_point_of_its_grid() -> None:
    pallas = pytest.importorskip("jax.experimental.pallas")

    def double(source: Any, target: Any) -> None:
        target[...] = source[...] * 2.0

    block = pallas.BlockSpec((8, 128), lambda i: (i, 0))
    call = pallas.pallas_call(
        double, grid=(4,), in_specs=[block], out_specs=block, out_shape=jax.ShapeDtypeStruct((32, 128), jnp.float32)
    )
    assert flops(call, (32, 128)) == math.prod((32, 128))
