"""What collectives move is the same at the other end, bit for bit, whatever its dtype and shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from piper_jax.lowering import shards
from piper_jax.lowering.exchange import num_words, pack, unpack
from piper_jax.lowering.fences import after_fence

VALUES: list[Any] = [
    jnp.asarray([1.5 - 2.25j, 3e-8j], jnp.complex64),
    jnp.asarray(2 - 1j, jnp.complex64),
    jnp.asarray([[True], [False]]),
    jnp.asarray(-3, jnp.int8),
    jnp.asarray([65535], jnp.uint16),
    jnp.asarray(2**32 - 1, jnp.uint32),
    jnp.asarray([1.5, -0.0], jnp.bfloat16),
    jnp.zeros((0, 5)),
]


def assert_same(found: Any, value: Any) -> None:
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    np.testing.assert_array_equal(found, value)


def test_exchanged_values_are_unpacked_as_they_were_packed() -> None:
    words = pack(VALUES)
    assert words.dtype == jnp.uint32
    assert words.shape == (sum(map(num_words, VALUES)),)
    for found, value in zip(unpack(jnp.pad(words, (0, 3)), VALUES), VALUES, strict=True):
        assert_same(found, value)


def test_shards_of_several_dtypes_are_gathered_as_they_are() -> None:
    flat = [v.reshape(-1) for v in VALUES]
    gathered = jax.vmap(lambda _: tuple(shards.gather_whole(flat, [v.shape for v in VALUES], ("d",))), axis_name="d")
    for found, value in zip(gathered(jnp.zeros(1)), VALUES, strict=True):
        assert_same(found[0], value)


def test_a_fence_leaves_values_of_any_dtype_and_size_as_they_are() -> None:
    context: Any = SimpleNamespace(has_streams=True)
    for before in (VALUES[0], VALUES[2], VALUES[-1]):
        for found, value in zip(after_fence(context, {"fence": before}, "fence", VALUES), VALUES, strict=True):  # type: ignore[arg-type]
            assert_same(found, value)
