"""Regions evaluated on some of their experts: the same numbers and gradients, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import piper_jax as piper
from piper_jax.errors import PlanError
from piper_jax.tracing.flat import flatten, read
from piper_jax.tracing.local_experts import EXPERT_AXIS, LocalExperts, Part

EXPERTS, PARTS, PLACES, DIM = 4, 2, 3, 5
X = np.random.default_rng(0).standard_normal((EXPERTS, PLACES, DIM)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((EXPERTS, DIM, DIM)).astype(np.float32)
SHARED = np.random.default_rng(2).standard_normal((DIM, 7)).astype(np.float32)
ON_ONE = jax.sharding.NamedSharding(
    jax.sharding.Mesh(jax.devices()[:1], ("tensor",)), jax.sharding.PartitionSpec(None, None, "tensor")
)
Region = Callable[[Any, Any], Any]


def locally(region: Region) -> Callable[[Any, Any], Any]:
    """``region`` on each device's experts, all devices' results together."""
    flat = flatten(jax.make_jaxpr(region)(X, W))
    part = Part(0, EXPERTS, EXPERTS // PARTS)

    def on_one(x: Any, w: Any) -> Any:
        found = LocalExperts.of("experts", flat, dict.fromkeys(flat.inputs, part))
        env = {**flat.consts, **dict(zip(flat.inputs, (x, w), strict=True))}
        found.run(flat.eqns, env)
        (out,) = flat.outputs
        assert found.parts.get(out) == part  # type: ignore[arg-type]
        return read(out, env)

    def whole(x: Any, w: Any) -> Any:
        divided = (a.reshape(PARTS, EXPERTS // PARTS, *a.shape[1:]) for a in (x, w))
        out = jax.vmap(on_one, axis_name=EXPERT_AXIS)(*divided)
        return out.reshape(EXPERTS, *out.shape[2:])

    return whole


def each(x: Any, w: Any) -> Any:
    return jnp.einsum("ecd,edf->ecf", x, w)


APART: dict[str, Region] = {
    "a vector beside all experts": lambda x, w: (x @ w) * jnp.arange(1.0, DIM + 1) + np.linspace(0, 1, DIM, dtype="f"),
    "a mask of places": lambda x, w: (x @ w) * (jnp.arange(x.shape[1]) < 2)[None, :, None],
    "a constant of size one": lambda x, w: (x @ w) * jnp.full((1, 1, 1), 2.0),
    "swiglu": lambda x, w: jax.nn.silu(each(x, w)) * each(x, w),
    "relu": lambda x, w: jax.nn.relu(each(x, w)),
    "gelu": lambda x, w: jax.nn.gelu(each(x, w), approximate=False),
    "softmax": lambda x, w: jax.nn.softmax(each(x, w), -1),
    "norm": lambda x, w: (x - x.mean(1, keepdims=True)) * lax.rsqrt(jnp.var(x, 1, keepdims=True) + 1.0),
    "shared weights": lambda x, w: (x @ SHARED).sum(-1),
    "shared on the left": lambda x, w: jnp.einsum("df,ecd->fec", SHARED, x).transpose(1, 2, 0),
    "batch dimension moved": lambda x, w: jnp.einsum("ecd,edf->fec", x, w).transpose(1, 0, 2),
    "reshape": lambda x, w: each(x, w).reshape(EXPERTS, PLACES * DIM),
    "split and joined": lambda x, w: jnp.concatenate(jnp.split(x, [2], axis=2)[::-1], axis=2),
    "padded and cut": lambda x, w: jnp.pad(x, ((0, 0), (1, 1), (0, 0)))[:, 1:3, ::2],
    "reversed": lambda x, w: jnp.flip(x, (1, 2)),
    "sorted": lambda x, w: jnp.sort(x, axis=1) + jnp.cumsum(x, axis=2),
    "squeezed": lambda x, w: jnp.squeeze(x[:, :1], 1) * x.max(1),
    "mask of experts": lambda x, w: jnp.where(jnp.arange(EXPERTS)[:, None, None] % 3 == 0, x, -x),
    "numbers of experts": lambda x, w: x * lax.iota(jnp.float32, EXPERTS)[:, None, None],
    "constant matrices": lambda x, w: each(x, np.arange(EXPERTS * DIM * 2.0).reshape(EXPERTS, DIM, 2)),
    "constrained": lambda x, w: lax.with_sharding_constraint(each(x, w), ON_ONE),
    "slice at a place": lambda x, w: lax.dynamic_slice(x, (0, 1, 0), (EXPERTS, 2, DIM)),
}  # fmt: skip
MIXED: dict[str, Region] = {
    "sum": lambda x, w: x - x.sum(0),
    "reversed": lambda x, w: x[::-1],
    "rolled": lambda x, w: jnp.roll(x, 1, axis=0),
    "cumulative": lambda x, w: jnp.cumsum(x, 0),
    "sorted": lambda x, w: jnp.sort(x, 0),
    "contracted": lambda x, w: jnp.einsum("ecd,edf->cf", x, w) + x,
    "crossed": lambda x, w: jnp.einsum("ecd,gdf->egcf", x, w).max(1),
    "merged": lambda x, w: (x.reshape(-1, DIM) @ SHARED).reshape(EXPERTS, PLACES, -1),
    "some": lambda x, w: jnp.concatenate([x[:2], x[2:]]),
    "gathered": lambda x, w: x[jnp.array([1, 0, 3, 2])],
    "looped": lambda x, w: lax.fori_loop(0, 2, lambda _, y: y * 2, x),
}


@pytest.mark.parametrize("name", APART)
def test_experts_that_are_kept_apart_give_the_same_numbers_and_gradients(name: str) -> None:
    region = APART[name]
    np.testing.assert_allclose(locally(region)(X, W), region(X, W), rtol=2e-6, atol=2e-6)
    loss = lambda f: lambda x, w: (jnp.sin(f(x, w)) ** 2).sum()  # noqa: E731
    found, expected = (jax.grad(loss(f), (0, 1))(X, W) for f in (locally(region), region))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", MIXED)
def test_experts_that_are_mixed_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match="cannot be sharded"):
        locally(MIXED[name])(X, W)


@pytest.mark.parametrize("bound", [1e306, np.float32(1.5), 2])
def test_a_bound_of_rows_is_any_number_above_0(bound):
    assert piper.expert_region(lambda x: x + 1, row_bound=bound)(jnp.zeros(2)).sum() == 2
